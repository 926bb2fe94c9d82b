"""Fill a variant's template: axis values, constants, tuning and target in, TileLang source text out.

The only module that knows Jinja2. Values reach the text as Python literals and nothing else, so data can never become code;
a name that is missing, and a value that no template uses, are errors.
"""

from __future__ import annotations

import contextlib
import functools
import math
import signal
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2 import meta, nodes
from jinja2.runtime import Context, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment

from tkbuild.arch import target_profile
from tkbuild.errors import RenderError, StepTimeoutError
from tkbuild.variants import Variant

_DATA = ("tuning", "target")
#: Where templates of all families find what they share, seen from a spec's folder.
_COMMON = "../common/"
_MAX_SOURCE_CHARS = 2_000_000
RENDER_TIMEOUT_S = 60.0
# What Jinja2 itself defines, in loops, macros and blocks.
_JINJA_NAMES = frozenset(("loop", "self", "super", "caller", "varargs", "kwargs"))


@dataclass(frozen=True)
class SourceFile:
    """A file that enters the key beside the rendered text: its name beside the spec, and its bytes."""

    name: str
    content: bytes


@dataclass(frozen=True)
class RenderedSource:
    """The TileLang source of one variant. ``text`` and ``sources`` are all of the spec's files that lowering can see."""

    variant: str
    template: Path
    text: str
    sources: tuple[SourceFile, ...] = ()


class Renderer:
    """Renders variants; keeps compiled templates, so one of it serves a whole build. Sees files as they were when first read.

    timeout_s: processor time one variant may take, in seconds. It can be limited in the main thread only.
    """

    def __init__(self, timeout_s: float = RENDER_TIMEOUT_S) -> None:
        self._timeout_s = timeout_s
        self._folder = functools.cache(_Folder)

    def render(self, variant: Variant) -> RenderedSource:
        """Return the source of ``variant``.

        Raises: RenderError with ``template``, ``line`` and ``variant``: a missing or unused name, a value that is no literal,
        a syntax error, an include from outside the spec's folder and ``../common``. StepTimeoutError with ``template`` and ``variant``.
        """
        folder = self._folder(variant.spec.folder)
        file = variant.target.template.name
        try:
            used = folder.used_names(file)
            template = folder.template(file)
            values = _values(variant)
            with _time_limit(self._timeout_s):
                text = template.render(values)
            # After rendering, since that knows the very line of an undefined name that it meets.
            folder.refuse_unknown(file, values)
            # Last: a misspelt name is told as such, not by the right one that nobody uses.
            _refuse_unused(variant, used)
        except _OutOfTime as exc:
            raise _out_of_time(self._timeout_s, variant, *_place(exc, variant, file)) from exc
        except RenderError as exc:
            raise _located(exc.message, variant, *_place(exc, variant, file)) from exc
        except jinja2.TemplateSyntaxError as exc:
            raise _located(f"syntax error: {exc.message}", variant, _file_name(exc, file), exc.lineno) from exc
        except jinja2.TemplateNotFound as exc:
            raise _located(f"no template {exc.name!r} in {variant.spec.folder}", variant, file, None) from exc
        except jinja2.UndefinedError as exc:
            seen = ", ".join(sorted(_values(variant)))
            raise _located(f"{exc.message}; the template sees {seen}", variant, *_place(exc, variant, file)) from exc
        except Exception as exc:  # a template can run into any exception of the values it works on
            raise _located(f"{type(exc).__name__}: {exc}", variant, *_place(exc, variant, file)) from exc
        return RenderedSource(variant.id, variant.target.template, _checked(text, variant, file), folder.sources(variant))


def render(variant: Variant) -> RenderedSource:
    """Return the source of one ``variant``. Raises: RenderError. To render many, keep a ``Renderer``."""
    return Renderer().render(variant)


class _OutOfTime(Exception):  # noqa: N818 - control flow inside this module, never seen outside
    """The time limit was reached."""


@contextlib.contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    """Raise ``_OutOfTime`` after ``seconds`` of the process's time; without effect in other threads than the main one."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(_signal: int, _frame: object) -> NoReturn:
        raise _OutOfTime

    before = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def _out_of_time(seconds: float, variant: Variant, file: str, line: int | None) -> StepTimeoutError:
    path = variant.spec.folder / file
    where = f"{path}:{line}" if line else str(path)
    return StepTimeoutError(
        f"{where}: rendering {variant.id} was stopped after {seconds:g} s; make the template's loops shorter",
        template=str(path),
        line=line,
        variant=variant.id,
    )


def _checked(text: str, variant: Variant, file: str) -> str:
    if len(text) > _MAX_SOURCE_CHARS:
        raise _located(f"rendered {len(text)} characters; the limit is {_MAX_SOURCE_CHARS}", variant, file, None)
    return text if text.endswith("\n") else text + "\n"


def _located(message: str, variant: Variant, file: str, line: int | None) -> RenderError:
    path = variant.spec.folder / file
    where = f"{path}:{line}" if line else str(path)
    text = f"{where}: {message}\n  while rendering {variant.id} of {variant.spec.path}"
    return RenderError(text, template=str(path), line=line, variant=variant.id)


def _file_name(exc: jinja2.TemplateSyntaxError, file: str) -> str:
    # Jinja2 names templates that it was not asked to load itself <introspection> or <template>.
    return file if exc.name is None or exc.name.startswith("<") else exc.name


def _place(exc: Exception, variant: Variant, file: str) -> tuple[str, int | None]:
    """Return the template, seen from the spec's folder, and line that ``exc`` came from: its innermost traceback entry of a template."""
    facts = getattr(exc, "facts", {})
    found: tuple[str, int | None] = (facts.get("file", file), facts.get("line"))
    for frame, line in traceback.walk_tb(exc.__traceback__):
        path = Path(frame.f_code.co_filename)
        if path.parent in (variant.spec.folder, variant.spec.folder / _COMMON):
            found = (str(path.relative_to(variant.spec.folder)), line)
    return found


# ---- what templates see


def _values(variant: Variant) -> dict[str, Any]:
    return {
        **{name: _freeze(value) for name, value in variant.spec.constants.items()},
        **variant.axes,
        "tuning": _Record("tuning", {name: _freeze(value) for name, value in variant.target.tuning.items()}),
        "target": _Record("target", asdict(target_profile(variant.arch))),
    }


def _freeze(value: Any) -> Any:
    if isinstance(value, dict):
        return _Record("this mapping", {key: _freeze(item) for key, item in value.items()})
    return tuple(map(_freeze, value)) if isinstance(value, tuple) else value


class _Record:
    """Named values, by attribute or by index; nothing else is reachable through it."""

    __slots__ = ("_name", "_values")

    def __init__(self, name: str, values: Mapping[str, Any]) -> None:
        self._name, self._values = name, values

    def __getitem__(self, key: object) -> Any:
        text = ("true" if key else "false") if isinstance(key, bool) else str(key)
        if text not in self._values:
            raise RenderError(f"{self._name} has no {text!r}; it has: {', '.join(self._values) or 'nothing'}")
        return self._values[text]


def _literal(value: Any) -> str:
    """Return ``value`` as a Python literal. Raises: RenderError for what is none, and for floats that are whole numbers."""
    if isinstance(value, jinja2.Undefined):
        _undefined(value)
    if isinstance(value, float):
        return _float_literal(value)
    if isinstance(value, _SourceText):
        return str(value)
    if value is None or type(value) in (bool, int, str):
        return repr(value)
    if type(value) in (tuple, list):
        return _sequence_literal(value)
    raise RenderError(f"a value of type {type(value).__name__} is no literal; write one of its parts")


def _undefined(value: jinja2.Undefined) -> NoReturn:
    str(value)  # StrictUndefined raises, naming what is undefined
    raise RenderError("an undefined value")


def _float_literal(value: float) -> str:
    if not math.isfinite(value) or value.is_integer():
        raise RenderError(f"{value} is no float to write out: for an integer use // instead of /, else write it in the template")
    return repr(value)


def _sequence_literal(value: tuple[Any, ...] | list[Any]) -> str:
    inner = ", ".join(map(_literal, value))
    if isinstance(value, list):
        return f"[{inner}]"
    return f"({inner},)" if len(value) == 1 else f"({inner})"


# ---- the environment


class _SourceText(str):
    """What a macro rendered: source already, in which every value became a literal. Whatever is made of it is plain data."""


class _Environment(ImmutableSandboxedEnvironment):
    """A sandbox whose records have no attributes but their values, and whose macros render source."""

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805 - as in Jinja2
        """Return what ``__obj`` returns, as source text if it is a macro."""
        result = super().call(__context, __obj, *args, **kwargs)
        return _SourceText(result) if isinstance(__obj, Macro) else result

    def getattr(self, obj: Any, attribute: str) -> Any:
        """Return a record's value, or what the sandbox allows of anything else."""
        return obj[attribute] if isinstance(obj, _Record) else super().getattr(obj, attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:
        """Return a record's value, or what the sandbox allows of anything else."""
        return obj[argument] if isinstance(obj, _Record) else super().getitem(obj, argument)


class _Folder:
    """The templates of one folder, compiled when first needed."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._tree = functools.cache(self._parse)
        self._used = functools.cache(self._names_in)
        self._files = functools.cache(self._files_of)
        self._loose = functools.cache(self._loose_names)
        self._compiled = functools.cache(self._compile)
        self._source = functools.cache(_read)
        self._environment = _Environment(
            loader=jinja2.FunctionLoader(self._load),
            undefined=jinja2.StrictUndefined,
            finalize=_literal,
            keep_trailing_newline=True,
            auto_reload=False,
            cache_size=-1,
        )

    def template(self, name: str) -> jinja2.Template:
        """Return the compiled template ``name``."""
        return self._compiled(name)

    def used_names(self, name: str) -> frozenset[str]:
        """Return the names that template ``name``, or one it includes, takes from outside: ``block``, ``tuning.threads``."""
        return self._used(name)

    def refuse_unknown(self, name: str, values: Mapping[str, Any]) -> None:
        """Raise RenderError for a name that is nowhere defined: ``default(..)`` and ``is defined`` would hide a misspelling."""
        for file, line, unknown in self._loose(name):
            if unknown not in values:
                message = f"{unknown!r} is undefined; the template sees {', '.join(sorted(values))}"
                raise RenderError(message, line=line, file=file)

    def _loose_names(self, name: str) -> tuple[tuple[str, int, str], ...]:
        """Return file, line and name of what ``name`` and the templates it includes use, and none of them defines."""
        trees = {file: self._tree(file) for file in self._files(name)}
        known = {*_JINJA_NAMES, *(stored for tree in trees.values() for stored in _stored(tree))}
        loose = {file: meta.find_undeclared_variables(tree) - known for file, tree in trees.items()}
        return tuple((f, n.lineno, n.name) for f, tree in trees.items() for n in tree.find_all(nodes.Name) if n.name in loose[f])

    def _files_of(self, name: str) -> tuple[str, ...]:
        included = [other for other in meta.find_referenced_templates(self._tree(name)) if other is not None]
        return tuple(dict.fromkeys([name, *(file for other in included for file in self._files(other))]))

    def _compile(self, name: str) -> jinja2.Template:
        # Jinja2's get_template would parse the file a second time.
        code = self._environment.compile(self._tree(name), name, str(self._path / name))
        return jinja2.Template.from_code(self._environment, code, self._environment.make_globals(None))

    def sources(self, variant: Variant) -> tuple[SourceFile, ...]:
        """Return the files that ``variant``'s spec names as sources."""
        return tuple(SourceFile(path.name, self._source(path)) for path in variant.spec.sources)

    def _load(self, name: str) -> tuple[str, str, Callable[[], bool]] | None:
        path, file = self._path / name, name.removeprefix(_COMMON)
        folder = self._path if file == name else self._path / _COMMON
        if Path(file).name != file or not path.is_file() or path.resolve().parent != folder.resolve():
            return None
        return _decoded(self._source(path), path), str(path), lambda: True

    def _parse(self, name: str) -> nodes.Template:
        loaded = self._load(name)
        if loaded is None:
            raise jinja2.TemplateNotFound(name)
        tree = self._environment.parse(loaded[0], name, loaded[1])
        _refuse_raw_text(tree)
        return tree

    def _names_in(self, name: str) -> frozenset[str]:
        tree = self._tree(name)
        used = set(meta.find_undeclared_variables(tree)) | set(_attributes(tree))
        for other in meta.find_referenced_templates(tree):
            if other is None:
                raise RenderError("the name of an included template must be a constant", line=1)
            used |= self._used(other)
        return frozenset(used)


def _refuse_raw_text(tree: nodes.Template) -> None:
    """Refuse the blocks that would put the text of a value into the source without making a literal of it."""
    imported = {node.target for node in tree.find_all(nodes.Import)}
    for node in tree.find_all((nodes.FilterBlock, nodes.CallBlock)):
        callee: Any = node.call.node if isinstance(node, nodes.CallBlock) else None
        base = callee.node if isinstance(callee, nodes.Getattr) else None
        from_import = isinstance(base, nodes.Name) and base.name in imported
        if not isinstance(callee, nodes.Name) and not from_import:
            raise RenderError("only a macro can be called in a call block, and there are no filter blocks", line=node.lineno)


def _stored(tree: nodes.Template) -> Iterator[str]:
    """Yield the names that a template itself gives a value: by ``set``, ``for``, ``with``, macros and imports."""
    yield from (node.name for node in tree.find_all(nodes.Name) if node.ctx != "load")
    yield from (node.name for node in tree.find_all(nodes.Macro))
    yield from (node.target for node in tree.find_all(nodes.Import))
    for node in tree.find_all(nodes.FromImport):
        yield from (name if isinstance(name, str) else name[1] for name in node.names)


def _attributes(tree: nodes.Template) -> Iterator[str]:
    """Yield ``tuning.NAME`` for each attribute or constant index of a data record, ``tuning.*`` for any other use."""
    counted = 0
    for node in _accesses(tree):
        if isinstance(node.node, nodes.Name) and node.node.name in _DATA:
            counted += 1
            yield f"{node.node.name}.{_key(node)}"
    uses = sum(node.name in _DATA and node.ctx == "load" for node in tree.find_all(nodes.Name))
    if uses > counted:
        yield "tuning.*"


def _accesses(tree: nodes.Template) -> Iterator[nodes.Getattr | nodes.Getitem]:
    yield from tree.find_all(nodes.Getattr)
    yield from tree.find_all(nodes.Getitem)


def _key(node: nodes.Getattr | nodes.Getitem) -> str:
    if isinstance(node, nodes.Getattr):
        return node.attr
    return str(node.arg.value) if isinstance(node.arg, nodes.Const) else "*"


def _refuse_unused(variant: Variant, used: frozenset[str]) -> None:
    """Refuse axes, constants and tuning values that the template never refers to: they are misspelt or stale."""
    axes = [f"axis {name!r}" for name in variant.axes if name not in used]
    constants = [f"constant {name!r}" for name in variant.spec.constants if name not in used]
    tuning = [] if "tuning.*" in used else [f"tuning value {n!r}" for n in variant.target.tuning if f"tuning.{n}" not in used]
    if axes or constants or tuning:
        raise RenderError(f"{', '.join([*axes, *constants, *tuning])}: in the spec, but the template never uses it")


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as exc:
        raise RenderError(f"{path} cannot be read: {exc.strerror}") from exc


def _decoded(content: bytes, path: Path) -> str:
    try:
        return content.decode("utf-8").replace("\r\n", "\n")
    except UnicodeDecodeError as exc:
        raise RenderError(f"{path} is not UTF-8 text: {exc.reason}", line=content.count(b"\n", 0, exc.start) + 1) from exc

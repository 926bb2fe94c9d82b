"""What must hold between the parts of a kernel spec, beyond the shape of each: names, types, files, combinations.

Works on the plain values of a file, where a part that could not be read is missing or ``BAD``, and reports everything
that can be judged without it.
"""

from __future__ import annotations

import itertools
import keyword
import math
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from tkbuild.arch import TargetArch, target_profile
from tkbuild.dtypes import BY_SHORT_NAME, DTYPES, TENSOR_DTYPES
from tkbuild.errors import ArgumentError
from tkbuild.expr import FUNCTIONS, INT64_MAX, Expr, Node
from tkbuild.flags import DEVICE_FLAGS_CONFIG, REGISTER_LEVEL_CONFIG, device_flags, refusal
from tkbuild.reference_names import own_reference_problem, reference_names
from tkbuild.schema import BAD, Report, nearest
from tkbuild.signature import FACTS, INTEGER_RANGES, axis_text

MAX_COMBINATIONS = 100_000
_MAX_CONSTANT = 2**31 - 1
CASE_KEYS = ("why", "large", "inputs")
"""Keys of a case that are no names of its call."""
_JINJA_WORDS = (
    *("range", "dict", "lipsum", "cycler", "joiner", "namespace", "loop", "self", "varargs", "kwargs", "caller"),
    *("true", "false", "none"),
)
RESERVED = frozenset((*FUNCTIONS, *FACTS, *_JINJA_WORDS, "tuning", "target", "kernel", *CASE_KEYS))
_SECTIONS = ("constants", "axes", "args", "scalars", "options", "dims")
_AXIS_TEXT = re.compile(r"[A-Za-z0-9_.]+", re.ASCII)
_AXIS_PYTHON: dict[str, Any] = {"int": int, "bool": bool, "str": str, "dtype": str}
FILL_NAMES = (
    *("normal", "uniform", "randint", "ties", "normal_with_specials", "random_scale", "codes", "e4m3_codes", "scales_f32"),
    *("scales_ue8m0_words", "random_bits", "moe_scores_with_specials", "zeros", "ones"),
    *("slots", "where_valid", "inverse_of", "segment_ends", "none"),
)
"""The fills of ``tkbuild.fills``, which needs torch and so cannot be asked here."""
_DIVISIONS = ("//", "%", "ceildiv", "align")


def check_spec(path: Path, given: dict[str, Any], report: Report) -> None:
    """Report what does not hold between the parts of the spec ``given`` from the file ``path``."""
    names = _Names(given)
    _check_names(given, report)
    _check_files(path, given, report)
    _check_targets(path, given, report)
    for section in ("constants", "targets"):
        _check_truth(section, given.get(section), report)
    for name, axis in _good(given, "axes"):
        _check_axis(f"axes.{name}", name, axis, names, report)
    for name, arg in _good(given, "args"):
        _check_arg(f"args.{name}", name, arg, names, report)
    for section in ("scalars", "options"):
        for name, scalar in _good(given, section):
            _check_default(f"{section}.{name}.default", scalar, report)
    _check_dims(given, names, report)
    _check_conditions(given, names, report)
    _check_flags(given, report)
    _check_reference(path, given, report)
    _check_verify(given, names, report)
    _check_bench(given, names, report)
    _check_combinations(given, report)


def check_profile(path: Path, given: dict[str, Any], report: Report) -> None:
    """Report what does not hold between the parts of the profile ``given`` from the file ``path``."""
    if given["profile"] != path.stem:
        report.add("profile", f"expected {path.stem}, the name of the file")
    for kernel, axes in _items(given.get("axes")):
        for axis, values in _items(axes):
            if len(set(map(axis_text, (v for v in values if v is not None)))) < len(values):
                report.add(f"axes.{kernel}.{axis}", "a value is given twice")


# ---- names


class _Names:
    """Which names a spec declares or binds, and as what."""

    def __init__(self, given: dict[str, Any]) -> None:
        self.axes: dict[str, Any] = _section(given, "axes")
        self.args: dict[str, Any] = _section(given, "args")
        self.scalars: dict[str, Any] = _section(given, "scalars")
        self.options: dict[str, Any] = _section(given, "options")
        declared = {*self.axes, *self.scalars, *self.options, *FACTS}
        self.shape_dims = _ordered(self._bare(("in", "inout"), "shape"), declared)
        self.dims = _ordered([*self.shape_dims, *self._bare(("in", "out", "inout", "workspace"), "strides")], declared)
        self.at_call = {*declared, *self.dims}
        # What a missing or broken argument would have bound is unknown, so no name can be called unknown then.
        self.complete = bool(self.args) and all(self.args.values())
        self.text_axes = {n: a for n, a in self.axes.items() if a and a["type"] in ("str", "dtype")}
        self.floats = {n for n, s in {**self.scalars, **self.options}.items() if s and s["dtype"].startswith("float")}

    def _bare(self, roles: tuple[str, ...], key: str) -> list[str]:
        exprs = [e for arg in self.args.values() if arg and arg["role"] in roles for e in arg.get(key) or ()]
        return [e.node for e in exprs if isinstance(e, Expr) and isinstance(e.node, str)]


def _ordered(names: Iterable[str], without: set[str]) -> dict[str, None]:
    return dict.fromkeys(name for name in names if name not in without)


def _section(given: dict[str, Any], name: str) -> dict[str, Any]:
    return given.get(name) or {}


def _items(value: Any) -> Iterator[tuple[str, Any]]:
    return iter([(key, item) for key, item in (value or {}).items() if item is not BAD])


def _good(given: dict[str, Any], section: str) -> Iterator[tuple[str, Any]]:
    return _items(given.get(section))


def _check_names(given: dict[str, Any], report: Report) -> None:
    """Names are one space: an expression or template could not tell two of them apart."""
    owner: dict[str, str] = {}
    for section in _SECTIONS:
        for name in _section(given, section):
            at = f"{section}.{name}"
            if name in RESERVED or keyword.iskeyword(name):
                report.add(at, f"the name {name!r} is reserved; choose another")
            first = owner.setdefault(name, section)
            if first != section:
                report.add(at, f"{name!r} is already a name in {first}; names must differ across {', '.join(_SECTIONS)}")


def _check_expr(expr: Any, at: str, known: Iterable[str], names: _Names, report: Report, tensors: bool = False) -> None:
    """Report unknown names, tensors where there can be none, and texts or floats used as integers."""
    if not isinstance(expr, Expr):
        return
    known = sorted(known)
    unknown = expr.names() - set(known) if names.complete or set(known) <= names.axes.keys() else set()
    for name in sorted(unknown):
        report.add(at, f"unknown name {name!r}{nearest(name, known)}; known here: {', '.join(known) or 'none'}")
    for name in sorted(expr.names() & names.floats):
        report.add(at, f"{name!r} is a float; expressions are over integers")
    for name in sorted(expr.tensors() - (names.args.keys() if tensors else set())):
        report.add(at, f"bytes({name}): " + ("no such argument" if tensors else "tensor sizes are known in bench only"))
    for message in _misused_texts(expr.node, names):
        report.add(at, message)
    for part in _zero_divisions(expr.node):
        report.add(at, f"{part} divides by zero")


def _zero_divisions(node: Node) -> Iterator[Expr]:
    """Yield the parts of ``node`` whose divisor is zero whatever the values are."""
    if not isinstance(node, tuple) or node[0] in ("str", "bytes"):
        return
    inner = [part for side in node[1:] for part in _zero_divisions(side)]
    yield from inner
    if node[0] in _DIVISIONS and not inner and _always_zero(node[2]):
        yield Expr(node)


def _always_zero(node: Node) -> bool:
    try:
        return Expr(node).substitute({}).constant == 0
    except ArgumentError:  # a folded part is beyond 64 bits, which is told where the value is needed
        return False


def _misused_texts(node: Node, names: _Names, compared: bool = False) -> Iterator[str]:
    if isinstance(node, str):
        if node in names.text_axes and not compared:
            yield f"the axis {node!r} is text: compare it with == or !="
    elif isinstance(node, tuple) and node[0] in ("==", "!="):
        yield from _wrong_comparison(node, names)
    elif isinstance(node, tuple) and node[0] not in ("str", "bytes"):
        for part in node[1:]:
            yield from _misused_texts(part, names)


def _wrong_comparison(node: tuple[Any, ...], names: _Names) -> Iterator[str]:
    sides = node[1:]
    texts = [side[1] for side in sides if isinstance(side, tuple) and side[0] == "str"]
    axes = [names.text_axes[side] for side in sides if isinstance(side, str) and side in names.text_axes]
    if not texts and len(axes) != 1:
        for side in sides:
            yield from _misused_texts(side, names, compared=True)
    elif len(axes) != 1 or len(texts) != 1:
        yield f"{Expr(node)}: text is compared with an axis of type str or dtype"
    elif texts[0] not in axes[0]["values"]:
        built = [str(value) for value in axes[0]["values"]]
        yield f"{texts[0]!r} is no value of this axis{_nearest_dtype(texts[0], built)}; values: {', '.join(built)}"


def _nearest_dtype(text: str, known: Iterable[str]) -> str:
    short = BY_SHORT_NAME.get(text)
    return f" (did you mean {short.name}?)" if short else nearest(text, known)


# ---- files and targets


def _check_files(path: Path, given: dict[str, Any], report: Report) -> None:
    if path.suffix != ".yaml":
        report.add("", "a spec's file name ends in .yaml")
    kernel = given.get("kernel")
    if kernel and kernel.partition(".")[2] != path.stem:
        report.add("kernel", f"expected family.{path.stem}: the kernel is named like its file")
    for i, name in enumerate(given.get("sources") or ()):
        _check_file(path.parent, name, f"sources[{i}]", report)


def _check_file(folder: Path, name: Any, at: str, report: Report) -> None:
    if not isinstance(name, str):
        return
    try:
        if (folder / name).is_file():
            return
        there = [file.name for file in folder.iterdir() if file.is_file()]
    except OSError as exc:
        report.add(at, f"the file {name[:60]!r} cannot be looked for: {exc.strerror}")
        return
    report.add(at, f"no file {name} beside the spec{nearest(name, there)}")


def _check_targets(path: Path, given: dict[str, Any], report: Report) -> None:
    default = given.get("template") or template_name(str(given.get("kernel") or ""))
    uses_default = False
    for name, tuning in _good(given, "targets"):
        _check_arch(name, report)
        if tuning is not None and not isinstance(tuning, dict):
            report.add(f"targets.{name}", "expected a mapping of tuning values")
        own = tuning.get("template") if isinstance(tuning, dict) else None
        if own is None:
            uses_default = True
        elif not isinstance(own, str) or "/" in own:
            report.add(f"targets.{name}.template", "expected the name of a file beside the spec")
        else:
            _check_file(path.parent, own, f"targets.{name}.template", report)
    if uses_default and given.get("kernel"):
        _check_file(path.parent, default, "template", report)


def template_name(kernel: str) -> str:
    """Return the name of the template that belongs to ``kernel`` where its spec names none."""
    return f"{kernel.partition('.')[2]}.py.j2"


def _check_arch(name: str, report: Report) -> None:
    try:
        target_profile(TargetArch.parse(name))
    except ArgumentError as exc:
        report.add(f"targets.{name}", exc.message)


def _check_truth(at: str, value: Any, report: Report) -> None:
    """Report quoted truth values: to a template they are text, and any text counts as true."""
    if isinstance(value, dict):
        for name, item in value.items():
            _check_truth(f"{at}.{name}", item, report)
    elif isinstance(value, tuple):
        for i, item in enumerate(value):
            _check_truth(f"{at}[{i}]", item, report)
    elif isinstance(value, str) and value.lower() in ("true", "false"):
        report.add(at, f"{value!r} is text, which a template takes for true: write {value.lower()} without quotes")


# ---- axes, arguments, scalars, dims


def _check_axis(at: str, name: str, axis: dict[str, Any], names: _Names, report: Report) -> None:
    seen: dict[str, Any] = {}
    for i, value in enumerate(axis["values"]):
        if value is BAD:
            continue
        problem = _axis_value_problem(axis["type"], value)
        if problem:
            report.add(f"{at}.values[{i}]", problem)
        elif seen.setdefault(axis_text(value), i) != i:
            report.add(f"{at}.values[{i}]", f"{axis_text(value)} is given twice")
    if "choose" in axis:
        if axis["type"] != "int":
            report.add(f"{at}.choose", "only an axis of type int can follow from a call")
        elif axis["choose"]["rule"] == "divides" and 0 in axis["values"]:
            report.add(f"{at}.choose.rule", "0 divides nothing; take it out of the values, or name another rule")
        _check_expr(axis["choose"]["of"], f"{at}.choose.of", names.at_call - names.axes.keys(), names, report)


def _axis_value_problem(kind: str, value: Any) -> str | None:
    if type(value) is not _AXIS_PYTHON[kind]:
        hint = "; remove the quotes" if isinstance(value, str) else "; put it in quotes" if kind == "str" else ""
        return f"expected a value of type {kind}, found {value!r}{hint}"
    if kind == "dtype" and value not in DTYPES:
        return f"unknown dtype {value!r}{_nearest_dtype(value, DTYPES)}; known: {', '.join(DTYPES)}"
    if kind == "int" and value < 0:
        return f"{value} is negative; an axis value is part of a variant id and cannot be"
    if kind == "str" and not _AXIS_TEXT.fullmatch(value):
        return f"{value!r}: a value consists of letters, digits, '_' and '.', since it is part of variant ids"
    return None


def _check_arg(at: str, name: str, arg: dict[str, Any], names: _Names, report: Report) -> None:
    _check_dtype(f"{at}.dtype", arg["dtype"], names, report)
    binds = arg["role"] in ("in", "inout")
    for i, expr in enumerate(arg["shape"]):
        _check_extent(expr, f"{at}.shape[{i}]", names, report)
        if isinstance(expr, Expr) and expr.is_name and not binds and expr.node in set(names.dims) - set(names.shape_dims):
            report.add(f"{at}.shape[{i}]", f"{expr} is bound by no shape of an in or inout tensor")
    strides = arg.get("strides")
    if strides is not None and len(strides) != len(arg["shape"]):
        report.add(f"{at}.strides", f"expected {len(arg['shape'])} strides, one a dimension, found {len(strides)}")
    for i, expr in enumerate(strides or ()):
        _check_extent(expr, f"{at}.strides[{i}]", names, report)
    align = arg.get("align", 16)
    if align & (align - 1):
        report.add(f"{at}.align", f"expected a power of two, found {align}")
    if "alloc" in arg:
        _check_alloc(f"{at}.alloc", name, arg, names, report)


def _check_extent(expr: Any, at: str, names: _Names, report: Report) -> None:
    _check_expr(expr, at, names.at_call, names, report)
    if isinstance(expr, Expr) and expr.constant is not None and not 1 <= expr.constant <= _MAX_CONSTANT:
        report.add(at, f"expected a constant from 1 to {_MAX_CONSTANT}, found {expr.constant}")


def _check_alloc(at: str, name: str, arg: dict[str, Any], names: _Names, report: Report) -> None:
    if arg["role"] not in ("out", "workspace") or arg.get("strides") is None:
        report.add(at, "only an out or workspace tensor with strides of its own is allocated by a rule")
        return
    if len(arg["alloc"]["strides"]) != len(arg["shape"]):
        report.add(f"{at}.strides", f"expected {len(arg['shape'])} strides, one a dimension")
    elsewhere = {
        e.node for n, a in names.args.items() if a and n != name for k in ("shape", "strides") for e in a.get(k) or () if e
    }
    own = {e.node for e in arg["strides"] if isinstance(e, Expr) and e.is_name and e.node in names.dims} - elsewhere
    for i, expr in enumerate(arg["alloc"]["strides"]):
        _check_expr(expr, f"{at}.strides[{i}]", names.at_call - own, names, report)
    _check_expr(arg["alloc"]["elems"], f"{at}.elems", names.at_call - own, names, report)


def _check_dtype(at: str, given: str | dict[str, Any], names: _Names, report: Report) -> None:
    if isinstance(given, dict):
        _check_dtype_map(at, given, names, report)
        return
    axis = names.axes.get(given)
    if given in names.axes:
        if axis and axis["type"] != "dtype":
            report.add(at, f"{given!r} is an axis of type {axis['type']}: use {{axis: {given}, map: {{..}}}}")
        found = axis["values"] if axis else ()
    else:
        found = (given,)
    for name in found:
        if isinstance(name, str):
            _check_tensor_dtype(at, name, names, report)


def _check_tensor_dtype(at: str, name: str, names: _Names, report: Report) -> None:
    if name in TENSOR_DTYPES:
        return
    if name in DTYPES:
        report.add(at, f"no tensor has the dtype {name}; say with {{axis: .., map: ..}} which one carries it (int8, uint8)")
    elif name not in names.axes:
        known = [*TENSOR_DTYPES, *(n for n, a in names.axes.items() if a and a["type"] == "dtype")]
        report.add(at, f"{name!r} is neither a dtype nor an axis{_nearest_dtype(name, known)}")


def _check_dtype_map(at: str, given: dict[str, Any], names: _Names, report: Report) -> None:
    axis = names.axes.get(given["axis"])
    if given["axis"] not in names.axes:
        report.add(f"{at}.axis", f"unknown axis {given['axis']!r}{nearest(given['axis'], names.axes)}")
    for key, dtype in _items(given["map"]):
        if dtype not in TENSOR_DTYPES:
            report.add(f"{at}.map.{key}", f"no tensor dtype {dtype!r}{_nearest_dtype(dtype, TENSOR_DTYPES)}")
    if axis:
        values = [axis_text(value) for value in axis["values"] if value is not BAD and value is not None]
        for value in values:
            if value not in given["map"]:
                report.add(f"{at}.map", f"no dtype for the value {value} of {given['axis']}")
        for key in given["map"]:
            if key not in values:
                report.add(f"{at}.map.{key}", f"no value of {given['axis']}{nearest(key, values)}; values: {', '.join(values)}")


def _check_default(at: str, scalar: dict[str, Any], report: Report) -> None:
    if "default" not in scalar:
        return
    value, dtype = scalar["default"], scalar["dtype"]
    if dtype == "bool":
        right = isinstance(value, bool)
    elif dtype.startswith("float"):
        right = type(value) in (int, float) and math.isfinite(value)
    else:
        least, most = INTEGER_RANGES[dtype]
        right = type(value) is int and least <= value <= most
    if not right:
        hint = "; remove the quotes" if isinstance(value, str) else ""
        report.add(at, f"expected a value of type {dtype}, found {value!r}{hint}")


def _check_dims(given: dict[str, Any], names: _Names, report: Report) -> None:
    for name, dim in _good(given, "dims"):
        if name not in names.dims and names.complete:
            known = ", ".join(names.dims) or "none"
            report.add(f"dims.{name}", f"no argument binds {name!r}{nearest(name, names.dims)}; bound: {known}")
        if dim.get("min", 0) > dim.get("max", INT64_MAX):
            report.add(f"dims.{name}", f"min {dim['min']} is above max {dim['max']}")


# ---- conditions, flags, verify, bench


def _check_conditions(given: dict[str, Any], names: _Names, report: Report) -> None:
    for section, known in (("constraints", set(names.axes)), ("checks", names.at_call)):
        for i, item in enumerate(given.get(section) or ()):
            if item is not BAD:
                _check_expr(item["require"], f"{section}[{i}].require", known, names, report)


def _check_flags(given: dict[str, Any], report: Report) -> None:
    for i, flag in enumerate(given.get("compile_flags") or ()):
        if isinstance(flag, str) and (problem := refusal(flag)):
            report.add(f"compile_flags[{i}]", problem)
    for name, value in _good(given, "pass_configs"):
        for problem in _wrong_pass_config(name, value):
            report.add(f"pass_configs.{name}", problem)


def _wrong_pass_config(name: str, value: Any) -> Iterator[str]:
    if value is None:
        yield "expected a value, found nothing"
    elif name == REGISTER_LEVEL_CONFIG and type(value) is not int:
        yield f"expected a whole number, found {value!r}"
    elif name == DEVICE_FLAGS_CONFIG and not isinstance(value, str):
        yield f"expected text, flags with spaces between them, found {value!r}"
    elif name == DEVICE_FLAGS_CONFIG:
        yield from filter(None, map(refusal, device_flags({name: value})))


def _check_reference(path: Path, given: dict[str, Any], report: Report) -> None:
    """A reference of one's own, ``module:function``, is imported where the kernel is verified; here its file is read, if it is near."""
    name = given.get("reference")
    if not isinstance(name, str):
        return
    if ":" in name:
        # Beside the spec, beside its family's folder, or in the project that has the folder of the specs.
        if problem := own_reference_problem(name, path.absolute().parents[:3]):
            report.add("reference", problem)
    elif name not in reference_names():
        report.add(
            "reference",
            f"tkbuild.reference has no {name}{nearest(name, reference_names())}; a function of your own is module:function",
        )


def _check_verify(given: dict[str, Any], names: _Names, report: Report) -> None:
    verify = given.get("verify")
    if not verify:
        return
    if not given.get("reference") and "reference" not in report.places:
        report.add("verify", "nothing to compare with: give the key 'reference' (family.function)")
    for key, roles in (("tolerance", ("out", "inout")), ("inputs", ("in", "inout"))):
        _check_tensors(f"verify.{key}", verify.get(key), roles, names, report)
    _check_fills("verify.inputs", verify.get("inputs"), report)
    _check_cases("verify.cases", verify["cases"], names, report)


def _check_fills(at: str, given: Any, report: Report) -> None:
    for name, text in _items(given):
        fill = text.partition("(")[0]
        if fill not in FILL_NAMES:
            report.add(f"{at}.{name}", f"unknown fill {fill!r}{nearest(fill, FILL_NAMES)}; known: {', '.join(FILL_NAMES)}")


def _check_tensors(at: str, given: Any, roles: tuple[str, ...], names: _Names, report: Report) -> None:
    known = [name for name, arg in names.args.items() if not arg or arg["role"] in roles]
    for name in given or ():
        if name not in known and names.args:
            report.add(f"{at}.{name}", f"no {' or '.join(roles)} tensor{nearest(name, known)}; known: {', '.join(known) or 'none'}")


def _check_bench(given: dict[str, Any], names: _Names, report: Report) -> None:
    bench = given.get("bench")
    if not bench:
        return
    for key in ("bytes", "flops"):
        _check_expr(bench.get(key), f"bench.{key}", names.at_call, names, report, tensors=True)
    _check_cases("bench.workloads", bench["workloads"], names, report)


def _check_cases(at: str, cases: tuple[Any, ...], names: _Names, report: Report) -> None:
    for i, case in enumerate(cases):
        if case is BAD or not names.args:
            continue
        _check_tensors(f"{at}[{i}].inputs", case.get("inputs"), ("in", "inout"), names, report)
        _check_fills(f"{at}[{i}].inputs", case.get("inputs"), report)
        if not case.keys() - CASE_KEYS:
            report.add(f"{at}[{i}]", "expected the values of a call: dimensions, scalars, options, axes")
        for name, value in _items({name: value for name, value in case.items() if name not in CASE_KEYS}):
            _check_case_values(f"{at}[{i}].{name}", name, value, names, report)
        for name in names.shape_dims:
            if name not in case:
                report.add(f"{at}[{i}]", f"no value for the dimension {name!r}")


def _check_case_values(at: str, name: str, value: Any, names: _Names, report: Report) -> None:
    values = value if isinstance(value, tuple) else (value,)
    if name in names.axes:
        axis = names.axes[name]
        for item in values:
            if axis and BAD not in (item, *axis["values"]) and not any(_same(item, v) for v in axis["values"]):
                built = [axis_text(v) for v in axis["values"] if v not in (BAD, None)]
                report.add(at, f"{item!r} is no value of the axis{nearest(str(item), built)}; values: {', '.join(built)}")
    elif name in names.at_call:
        for item in values:
            _check_case_value(at, name, item, names, report)
    elif names.complete:
        known = sorted((names.at_call | {*CASE_KEYS}) - set(FACTS))
        report.add(at, f"unknown name{nearest(name, known)}; known: {', '.join(known)}")


def _same(one: Any, other: Any) -> bool:
    return type(one) is type(other) and bool(one == other)


def _check_case_value(at: str, name: str, item: Any, names: _Names, report: Report) -> None:
    declared = names.scalars.get(name) or names.options.get(name)
    if item is BAD:
        return
    if isinstance(item, str):
        try:
            _check_expr(Expr.parse(item), at, names.at_call - {name}, names, report)
        except ArgumentError as exc:
            report.add(at, exc.message)
    elif declared:
        _check_default(at, {"dtype": declared["dtype"], "default": item}, report)
    elif type(item) is not int or item < 0:
        report.add(at, f"expected an integer >= 0 or an expression, found {item!r}")


# ---- combinations


def _check_combinations(given: dict[str, Any], report: Report) -> None:
    axes = _section(given, "axes")
    if report.problems or not axes:
        return
    total = math.prod(len(axis["values"]) for axis in axes.values())
    if total > MAX_COMBINATIONS:
        report.add("axes", f"{total} combinations of axis values; the limit is {MAX_COMBINATIONS}")
    elif not _any_combination(axes, given.get("constraints") or (), report):
        report.add("constraints", "no combination of axis values satisfies all constraints")


def _any_combination(axes: dict[str, Any], constraints: tuple[Any, ...], report: Report) -> bool:
    found = False
    for values in itertools.product(*(axis["values"] for axis in axes.values())):
        combination = dict(zip(axes, values, strict=True))
        for i, constraint in enumerate(constraints):
            try:
                holds = constraint["require"].evaluate(combination)
            except ArgumentError as exc:
                report.add(f"constraints[{i}].require", f"{exc.message}, for {combination}")
                return True
            if not holds:
                break
        else:
            found = True
            if not constraints:
                return True
    return found

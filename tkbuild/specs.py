"""Read kernel specs and profiles: YAML text in, frozen ``KernelSpec`` and ``Profile`` out, all problems at once.

The only module that knows YAML. One document per file; anchors, aliases and merge keys work (a mapping's own key wins over a
merged one); tags, duplicate keys and documents that grow large by repetition are refused.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NoReturn

import yaml

from tkbuild.errors import SpecError
from tkbuild.kernelspec import KernelSpec, Profile, build_profile, build_spec
from tkbuild.kernelspec import json_schema as json_schema
from tkbuild.schema import Map, Node, Problem, Report, Scalar, Sequence

MAX_FILE_BYTES = 1_000_000
MAX_DEPTH = 40
MAX_NODES = 50_000
PROFILES_FOLDER = "profiles"

_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def load_spec(path: Path) -> KernelSpec:
    """Return the kernel spec in ``path``. Raises: SpecError with all ``problems`` of the file."""
    report = Report(str(path))
    spec = _read_spec(path, report)
    if spec is None or report.problems:
        raise spec_error(report.problems)
    return spec


def load_specs(folder: Path) -> dict[str, KernelSpec]:
    """Return every kernel spec below ``folder`` by kernel name, in order of name.

    Raises: SpecError with the problems of all files, duplicate kernels and operators included, or if there is no spec at
    all, or for a folder that cannot be read.
    """
    problems: list[Problem] = []
    specs: dict[str, KernelSpec] = {}
    for path in _spec_files(folder):
        report = Report(str(path))
        spec = _read_spec(path, report)
        if spec is not None and not report.problems:
            _add(specs, spec, report)
        problems += report.problems
    if problems or not specs:
        raise spec_error(problems) if problems else SpecError(f"{folder}: no kernel spec (*.yaml) in it", problems=())
    return dict(sorted(specs.items()))


def load_profile(path: Path) -> Profile:
    """Return the profile in ``path``. Raises: SpecError with all ``problems`` of the file."""
    report = Report(str(path))
    root = _load_tree(path, report)
    profile = build_profile(path, root, report) if root is not None else None
    if profile is None or report.problems:
        raise spec_error(report.problems)
    return profile


def load_profiles(folder: Path) -> dict[str, Profile]:
    """Return every profile of ``folder`` (the kernel specs' folder) by name. Raises: SpecError."""
    paths = sorted((folder / PROFILES_FOLDER).glob("*.yaml"))
    profiles = [load_profile(path) for path in paths]
    return {profile.name: profile for profile in profiles}


def spec_error(problems: Iterable[Problem]) -> SpecError:
    """Return the error that reports ``problems``, one a line, in the order of their places."""
    ordered = tuple(sorted(problems, key=lambda problem: (problem.path, problem.line, problem.column)))
    return SpecError("\n".join(map(str, ordered)), problems=ordered)


def _spec_files(folder: Path) -> list[Path]:
    paths = [Path(at) / name for at, _folders, names in os.walk(folder, onerror=_refuse_folder) for name in names]
    relative = sorted(path.relative_to(folder) for path in paths if path.suffix in (".yaml", ".yml"))
    # Editors keep their own files, whose names start with a dot, beside the one that is being edited.
    return [folder / path for path in relative if PROFILES_FOLDER not in path.parts and not path.name.startswith(".")]


def _refuse_folder(exc: OSError) -> NoReturn:
    absent = isinstance(exc, FileNotFoundError | NotADirectoryError)
    reason = (
        "no such folder of kernel specs; go to that of a project, give --specs, or start one by `tkbuild init`"
        if absent
        else f"this folder cannot be read: {exc.strerror}"
    )
    raise SpecError(f"{exc.filename}: {reason}", problems=()) from exc


def _read_spec(path: Path, report: Report) -> KernelSpec | None:
    root = _load_tree(path, report)
    return build_spec(path, root, report) if root is not None else None


def _add(specs: dict[str, KernelSpec], spec: KernelSpec, report: Report) -> None:
    first = specs.setdefault(spec.name, spec)
    if first is not spec:
        report.add("kernel", f"{spec.name} is already described by {first.path}")
    same = [other.path for other in specs.values() if other.name != spec.name and other.signature.op == spec.signature.op]
    if same:
        report.add("op.name", f"the operator {spec.signature.op} is already that of {same[0]}; give one of them another op.name")


# ---- YAML


def _load_tree(path: Path, report: Report) -> Node | None:
    try:
        return _parse(_read_text(path, report), report)
    except _Stop:
        return None


def _read_text(path: Path, report: Report) -> str:
    try:
        content = path.read_bytes()
    except OSError as exc:
        raise _stop(report, f"cannot be read: {exc.strerror or exc}") from exc
    if len(content) > MAX_FILE_BYTES:
        raise _stop(report, f"has {len(content)} bytes; the limit is {MAX_FILE_BYTES}")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as exc:
        line = content.count(b"\n", 0, exc.start) + 1
        raise _stop(report, f"is not UTF-8 text: {exc.reason}", Node(line, 1)) from exc


def _parse(text: str, report: Report) -> Node:
    builder = _Builder(report)
    try:
        for event in yaml.parse(text, Loader=_Loader):
            builder.take(event)
    except yaml.reader.ReaderError as exc:
        line = text.count("\n", 0, exc.position) + 1
        raise _stop(report, f"no YAML: character {exc.character!r} is not allowed ({exc.reason})", Node(line, 1)) from exc
    except yaml.MarkedYAMLError as exc:
        mark = exc.problem_mark or exc.context_mark
        place = Node(mark.line + 1, mark.column + 1) if mark else None
        raise _stop(report, f"no YAML: {exc.problem or exc.context}", place) from exc
    if builder.root is None:
        raise _stop(report, "is empty")
    return builder.root


class _Stop(Exception):  # noqa: N818 - control flow inside this module, never seen outside
    """The document cannot be read further; the reason has been reported."""


def _stop(report: Report, message: str, place: Node | None = None) -> _Stop:
    report.add("", message, place)
    return _Stop()


class _Builder:
    """Makes a tree of parser events, without recursion, so that no document can exhaust the stack."""

    def __init__(self, report: Report) -> None:
        self.root: Node | None = None
        self._report = report
        self._open: list[tuple[Sequence | Map, str | None]] = []
        self._key: list[Scalar | None] = []
        self._merged: list[list[Map]] = []
        self._anchors: dict[str, Node] = {}

    def take(self, event: Any) -> None:
        """Add one event to the tree."""
        handle = _HANDLERS.get(type(event))
        if handle is not None:
            handle(self, event)

    def _document(self, event: Any) -> None:
        if self.root is not None:
            self._stop(event, "a second document; a spec is one YAML document")

    def _scalar(self, event: Any) -> None:
        if event.tag is not None:
            self._check_tag(event, event.implicit[0] or event.implicit[1])
        mark = event.start_mark
        self._close(Scalar(mark.line + 1, mark.column + 1, event.value, not event.style), event.anchor)

    def _check_tag(self, event: Any, implicit: bool) -> None:
        if event.tag is not None and not (implicit and event.tag == "!"):
            self._stop(event, f"the tag {event.tag} is not supported: write the value without a tag")

    def _stop(self, event: Any, message: str) -> None:
        mark = event.start_mark
        raise _stop(self._report, message, Node(mark.line + 1, mark.column + 1))

    def _start(self, event: Any) -> None:
        self._check_tag(event, event.implicit)
        if len(self._open) >= MAX_DEPTH:
            self._stop(event, f"nested more than {MAX_DEPTH} deep")
        mark = event.start_mark
        kind = Map if isinstance(event, yaml.MappingStartEvent) else Sequence
        self._open.append((kind(mark.line + 1, mark.column + 1), event.anchor))
        self._key.append(None)
        self._merged.append([])

    def _end(self, event: Any) -> None:
        node, anchor = self._open.pop()
        self._key.pop()
        for source in self._merged.pop():
            assert isinstance(node, Map)
            self._merge(node, source)
        self._close(node, anchor)

    @staticmethod
    def _merge(node: Map, source: Map) -> None:
        for key, value in source.entries.items():
            if key not in node.entries:
                node.entries[key], node.keys[key] = value, source.keys[key]
                node.size += value.size

    def _alias(self, event: Any) -> None:
        node = self._anchors.get(event.anchor)
        if node is None:
            self._stop(event, f"*{event.anchor} refers to no anchor before it")
        else:
            self._close(node, None)

    def _close(self, node: Node, anchor: str | None) -> None:
        """Put a finished node where it belongs."""
        if anchor is not None:
            self._anchors[anchor] = node
        if not self._open:
            self.root = node
            return
        parent = self._open[-1][0]
        parent.size += node.size
        if parent.size > MAX_NODES:
            raise _stop(self._report, f"more than {MAX_NODES} values, aliases counted in full", parent)
        if isinstance(parent, Sequence):
            parent.items.append(node)
        else:
            self._entry(parent, node)

    def _entry(self, parent: Map, node: Node) -> None:
        key = self._key[-1]
        if key is None:
            self._key[-1] = self._as_key(node)
            return
        self._key[-1] = None
        if key.plain and key.text == "<<":
            self._merged[-1] += self._sources(node)
        elif key.text in parent.entries:
            first = parent.keys[key.text]
            self._report.add("", f"the key {key.text!r} is given twice; first in line {first.line}", key)
        else:
            parent.entries[key.text], parent.keys[key.text] = node, key

    def _as_key(self, node: Node) -> Scalar:
        if isinstance(node, Scalar):
            return node
        raise _stop(self._report, "a key must be a single value, not a list or mapping", node)

    def _sources(self, node: Node) -> list[Map]:
        sources = node.items if isinstance(node, Sequence) else [node]
        maps = [source for source in sources if isinstance(source, Map)]
        if len(maps) < len(sources):
            self._report.add("", "<< merges a mapping or a list of mappings", node)
        return maps


_HANDLERS: dict[type, Callable[[_Builder, Any], None]] = {
    yaml.ScalarEvent: _Builder._scalar,
    yaml.MappingStartEvent: _Builder._start,
    yaml.SequenceStartEvent: _Builder._start,
    yaml.MappingEndEvent: _Builder._end,
    yaml.SequenceEndEvent: _Builder._end,
    yaml.AliasEvent: _Builder._alias,
    yaml.DocumentStartEvent: _Builder._document,
}

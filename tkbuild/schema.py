"""Strict schemas over document trees: one table both reads a file, with positions for every problem, and describes it.

A schema reads a node and returns a plain value, or ``BAD`` after it reported why. ``json_schema`` gives the same rule as
JSON Schema (draft 2020-12). Scalars follow one rule whatever YAML version a reader thinks of: what YAML 1.1 and 1.2 read
differently (010, 1:30, 1_000, yes, on) is refused, and 1e-6 is a number.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tkbuild.errors import ArgumentError
from tkbuild.expr import INT64_MAX, INT64_MIN, Expr

# ---- the tree


class Node:
    """A place in a document; lines and columns count from 1."""

    __slots__ = ("column", "line", "size")

    def __init__(self, line: int, column: int) -> None:
        self.line, self.column, self.size = line, column, 1


class Scalar(Node):
    """A single value: its text, and whether it stood without quotes."""

    __slots__ = ("plain", "text")

    def __init__(self, line: int, column: int, text: str, plain: bool) -> None:
        super().__init__(line, column)
        self.text, self.plain = text, plain


class Sequence(Node):
    """A list of nodes."""

    __slots__ = ("items",)

    def __init__(self, line: int, column: int) -> None:
        super().__init__(line, column)
        self.items: list[Node] = []


class Map(Node):
    """Nodes by key, without duplicates, in the order of the file; ``keys`` has the keys' own places."""

    __slots__ = ("entries", "keys")

    def __init__(self, line: int, column: int) -> None:
        super().__init__(line, column)
        self.entries: dict[str, Node] = {}
        self.keys: dict[str, Scalar] = {}


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong in a file: where, at which key, and what."""

    path: str
    line: int
    column: int
    at: str
    message: str

    def __str__(self) -> str:
        key = f" {self.at}:" if self.at else ""
        return f"{self.path}:{self.line}:{self.column}:{key} {self.message}"


@dataclass
class Report:
    """Collects the problems of one file, and where each key was."""

    path: str
    problems: list[Problem] = field(default_factory=list)
    places: dict[str, Node] = field(default_factory=dict)

    def add(self, at: str, message: str, node: Node | None = None) -> Any:
        """Note a problem at key ``at`` (at ``node``, or where the key or its nearest parent was); return ``BAD``."""
        place = node or self._place(at)
        self.problems.append(Problem(self.path, place.line, place.column, at, message))
        return BAD

    def _place(self, at: str) -> Node:
        while at and at not in self.places:
            at = at[: max(at.rfind("."), at.rfind("["), 0)]
        return self.places.get(at) or Node(1, 1)


class _Bad:
    """The value of what could not be read."""

    def __repr__(self) -> str:
        return "BAD"

    def __bool__(self) -> bool:
        return False


BAD = _Bad()


def nearest(name: str, known: Iterable[str]) -> str:
    """Return `` (did you mean X?)`` for the known name nearest to ``name``, or nothing."""
    options = [str(option) for option in known]
    folded = {option.casefold(): option for option in options}
    found = difflib.get_close_matches(name.strip().casefold(), folded, n=1, cutoff=0.6)
    return f" (did you mean {folded[found[0]]}?)" if found else ""


# ---- scalars

_INT = re.compile(r"[-+]?(?:0|[1-9][0-9]*)", re.ASCII)
_HEX = re.compile(r"0x[0-9a-fA-F]+", re.ASCII)
_FLOAT = re.compile(r"[-+]?(?:(?:0|[1-9][0-9]*)?\.[0-9]+|(?:0|[1-9][0-9]*)\.?)(?:[eE][-+]?[0-9]+)?", re.ASCII)
_AMBIGUOUS = re.compile(
    r"[-+]?(?:[0-9][0-9_,:.]*(?:[eE][-+]?[0-9]+)?|0[oObB][0-9_]+|0[xX][0-9a-fA-F_]+|\.inf|\.nan)", re.ASCII | re.I
)
_DATE = re.compile(r"[0-9]{4}-[0-9]{1,2}-[0-9]{1,2}.*", re.ASCII | re.S)
_WORDS: dict[str, bool | None] = {"true": True, "false": False, "null": None, "~": None, "": None}
_TRUTH_WORDS = frozenset(("yes", "no", "on", "off"))
_MAX_DIGITS = 40

Scalars = bool | int | float | str | None


def scalar_value(node: Scalar) -> Scalars:
    """Return the value of a scalar. Raises: ArgumentError for what is not read the same way everywhere."""
    text = node.text
    if not node.plain:
        return text
    if text in _WORDS:
        return _WORDS[text]
    if text[0].isalpha() and text[0] not in "yYnNoOtTfFiI":
        return text
    if _INT.fullmatch(text) or _HEX.fullmatch(text):
        return _integer(text)
    if _FLOAT.fullmatch(text):
        return _float(text)
    return _plain_text(text)


def _integer(text: str) -> int:
    value = int(text, 0) if len(text) <= _MAX_DIGITS else INT64_MAX + 1
    if not INT64_MIN <= value <= INT64_MAX:
        raise ArgumentError(f"{text[:_MAX_DIGITS]} does not fit in 64 bits")
    return value


def _float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ArgumentError(f"{text[:_MAX_DIGITS]} is beyond the range of a float")
    return value


def _plain_text(text: str) -> str:
    lower = text.lower()
    if lower in _TRUTH_WORDS:
        raise ArgumentError(f"{text} is a truth value to some YAML readers: write true or false, or put it in quotes")
    if lower in _WORDS or lower in ("inf", "nan"):
        raise ArgumentError(f"{text} is not read the same way everywhere: write {lower}, or put it in quotes")
    if _AMBIGUOUS.fullmatch(text) or _DATE.fullmatch(text):
        hint = "write a plain decimal number, or put text in quotes"
        raise ArgumentError(f"{text[:_MAX_DIGITS]} is not read the same way by all YAML readers: {hint}")
    return text


def describe(node: Node) -> str:
    """Return what a node is, for "expected X, found ..."."""
    if isinstance(node, Sequence):
        return "a list"
    if isinstance(node, Map):
        return "a mapping"
    assert isinstance(node, Scalar)
    try:
        value = scalar_value(node)
    except ArgumentError:
        return repr(node.text[:_MAX_DIGITS])
    if value is None:
        return "nothing"
    kinds = {bool: "the truth value", int: "the number", float: "the number", str: "the text"}
    return f"{kinds[type(value)]} {node.text[:60]!r}" if isinstance(value, str) else f"{kinds[type(value)]} {node.text[:60]}"


# ---- schemas


class Schema:
    """A rule for one node."""

    expected = "a value"

    def read(self, node: Node, at: str, report: Report) -> Any:
        """Return the plain value of ``node``, or ``BAD`` after reporting why; ``at`` is the path to it."""
        report.places[at] = node
        if not isinstance(node, Scalar):
            return self.wrong(node, at, report)
        try:
            value = scalar_value(node)
        except ArgumentError as exc:
            return report.add(at, f"expected {self.expected}; {exc.message}", node)
        return self.check(value, node, at, report)

    def check(self, value: Scalars, node: Scalar, at: str, report: Report) -> Any:
        """Return the value of a scalar if it fits, or ``BAD`` after reporting."""
        return value

    def wrong(self, node: Node, at: str, report: Report, hint: str = "") -> Any:
        """Report that another kind of value was expected."""
        return report.add(at, f"expected {self.expected}, found {describe(node)}{hint}", node)

    def json_schema(self) -> dict[str, Any]:
        """Return the rule as JSON Schema."""
        return {}


@dataclass(frozen=True)
class Text(Schema):
    """Text that matches ``pattern``, described by ``expected``."""

    pattern: str = ""
    expected: str = "text"

    def check(self, value: Scalars, node: Scalar, at: str, report: Report) -> Any:
        """Return the text."""
        if not isinstance(value, str):
            return self.wrong(node, at, report, "" if value is None else "; put text in quotes")
        if self.pattern and not re.fullmatch(self.pattern, value, re.ASCII):
            return self.wrong(node, at, report)
        return value

    def json_schema(self) -> dict[str, Any]:
        """Return the rule as JSON Schema."""
        return {"type": "string"} | ({"pattern": f"^(?:{self.pattern})$"} if self.pattern else {})


@dataclass(frozen=True)
class Int(Schema):
    """An integer in an inclusive range."""

    least: int = INT64_MIN
    most: int = INT64_MAX

    @property
    def expected(self) -> str:  # type: ignore[override]
        """The range in words."""
        return "an integer" if self.least == INT64_MIN else f"an integer from {self.least} to {self.most}"

    def check(self, value: Scalars, node: Scalar, at: str, report: Report) -> Any:
        """Return the integer."""
        if isinstance(value, bool) or not isinstance(value, int):
            return self.wrong(node, at, report, _unquote(value))
        return value if self.least <= value <= self.most else self.wrong(node, at, report)

    def json_schema(self) -> dict[str, Any]:
        """Return the rule as JSON Schema."""
        return {"type": "integer", "minimum": self.least, "maximum": self.most}


def _unquote(value: Scalars) -> str:
    numeric = isinstance(value, str) and (_INT.fullmatch(value) or _FLOAT.fullmatch(value) or value in ("true", "false"))
    return "; remove the quotes" if numeric else ""


@dataclass(frozen=True)
class Number(Schema):
    """A finite number that is not negative."""

    expected: str = "a finite number >= 0"

    def check(self, value: Scalars, node: Scalar, at: str, report: Report) -> Any:
        """Return the number as a float."""
        if isinstance(value, bool) or not isinstance(value, (int, float)) or value < 0:
            return self.wrong(node, at, report, _unquote(value))
        return float(value)

    def json_schema(self) -> dict[str, Any]:
        """Return the rule as JSON Schema."""
        return {"type": "number", "minimum": 0}


@dataclass(frozen=True)
class Bool(Schema):
    """true or false."""

    expected: str = "true or false"

    def check(self, value: Scalars, node: Scalar, at: str, report: Report) -> Any:
        """Return the truth value."""
        return value if isinstance(value, bool) else self.wrong(node, at, report, _unquote(value))

    def json_schema(self) -> dict[str, Any]:
        """Return the rule as JSON Schema."""
        return {"type": "boolean"}


@dataclass(frozen=True)
class Enum(Schema):
    """One of some words; they are words here even where YAML 1.1 sees a truth value (off, on)."""

    words: tuple[str, ...]

    @property
    def expected(self) -> str:  # type: ignore[override]
        """The words."""
        return "one of " + ", ".join(self.words)

    def read(self, node: Node, at: str, report: Report) -> Any:
        """Return the word."""
        report.places[at] = node
        if isinstance(node, Scalar) and node.text in self.words:
            return node.text
        return self.wrong(node, at, report, nearest(node.text, self.words) if isinstance(node, Scalar) else "")

    def json_schema(self) -> dict[str, Any]:
        """Return the rule as JSON Schema."""
        return {"enum": list(self.words)}


@dataclass(frozen=True)
class Exactly(Schema):
    """One integer, such as a format's version."""

    value: int

    @property
    def expected(self) -> str:  # type: ignore[override]
        """The value."""
        return str(self.value)

    def check(self, value: Scalars, node: Scalar, at: str, report: Report) -> Any:
        """Return the value."""
        return value if type(value) is int and value == self.value else self.wrong(node, at, report, _unquote(value))

    def json_schema(self) -> dict[str, Any]:
        """Return the rule as JSON Schema."""
        return {"const": self.value}


@dataclass(frozen=True)
class Expression(Schema):
    """An expression, as text or as an integer."""

    expected: str = "an expression"

    def check(self, value: Scalars, node: Scalar, at: str, report: Report) -> Any:
        """Return the Expr."""
        if isinstance(value, bool) or not isinstance(value, (int, str)):
            return self.wrong(node, at, report)
        try:
            return Expr.parse(value)
        except ArgumentError as exc:
            return report.add(at, exc.message, node)

    def json_schema(self) -> dict[str, Any]:
        """Return the rule as JSON Schema."""
        return {"type": ["string", "integer"]}


@dataclass(frozen=True)
class Plain(Schema):
    """Any scalar; with ``nested``, also lists and mappings of such."""

    nested: bool = False
    expected: str = "a number, text, true, false or null"

    def read(self, node: Node, at: str, report: Report) -> Any:
        """Return the value: lists as tuples, mappings as dicts."""
        if not self.nested or isinstance(node, Scalar):
            return Schema.read(self, node, at, report)
        report.places[at] = node
        if isinstance(node, Map):
            return {key: self.read(value, f"{at}.{key}", report) for key, value in node.entries.items()}
        assert isinstance(node, Sequence)
        return tuple(self.read(item, f"{at}[{i}]", report) for i, item in enumerate(node.items))

    def json_schema(self) -> dict[str, Any]:
        """Return the rule as JSON Schema."""
        scalars = ["boolean", "integer", "number", "string", "null"]
        return {"type": [*scalars, "array", "object"] if self.nested else scalars}


@dataclass(frozen=True)
class ListOf(Schema):
    """A list; ``least`` is the smallest number of items. Bad items stay in it as ``BAD``."""

    item: Schema
    least: int = 0
    expected: str = "a list"

    def read(self, node: Node, at: str, report: Report) -> Any:
        """Return the items as a tuple."""
        report.places[at] = node
        if not isinstance(node, Sequence):
            return self.wrong(node, at, report)
        if len(node.items) < self.least:
            return report.add(at, f"expected at least {self.least} item", node)
        return tuple([self.item.read(item, f"{at}[{i}]", report) for i, item in enumerate(node.items)])

    def json_schema(self) -> dict[str, Any]:
        """Return the rule as JSON Schema."""
        return {"type": "array", "items": self.item.json_schema()} | ({"minItems": self.least} if self.least else {})


@dataclass(frozen=True)
class MapOf(Schema):
    """A mapping of names that match ``key`` to values of one kind. Bad values stay in it as ``BAD``."""

    key: Text
    value: Schema
    least: int = 0
    expected: str = "a mapping"

    def read(self, node: Node, at: str, report: Report) -> Any:
        """Return the values by name."""
        report.places[at] = node
        if not isinstance(node, Map):
            return self.wrong(node, at, report)
        if len(node.entries) < self.least:
            return report.add(at, f"expected at least {self.least} entry", node)
        return {key: self.entry(node, key, at, report) for key in node.entries}

    def entry(self, node: Map, key: str, at: str, report: Report) -> Any:
        """Return the value of one key."""
        inner = f"{at}.{key}" if at else key
        if self.key.check(key, node.keys[key], inner, report) is BAD:
            return BAD
        return self.value.read(node.entries[key], inner, report)

    def json_schema(self) -> dict[str, Any]:
        """Return the rule as JSON Schema."""
        schema: dict[str, Any] = {"type": "object", "additionalProperties": self.value.json_schema()}
        if self.key.pattern:
            schema["propertyNames"] = self.key.json_schema()
        return schema | ({"minProperties": self.least} if self.least else {})


@dataclass(frozen=True)
class Object(Schema):
    """A mapping with known keys, some of them ``required``, and, where there is ``rest``, others by its rule.

    ``hint`` is added to the problem when something else stands there.
    """

    fields: Mapping[str, Schema]
    required: tuple[str, ...] = ()
    hint: str = ""
    rest: MapOf | None = None
    expected: str = "a mapping"

    def read(self, node: Node, at: str, report: Report) -> Any:
        """Return what was given by key, or ``BAD`` where a required key is missing or bad."""
        report.places[at] = node
        if not isinstance(node, Map):
            return self.wrong(node, at, report, self.hint)
        result = {key: self._entry(node, key, at, report) for key in node.entries}
        missing = [key for key in self.required if key not in node.entries]
        for key in missing:
            report.add(at, f"missing key {key!r}: expected {self.fields[key].expected}", node)
        broken = missing or any(result[key] is BAD for key in self.required)
        return BAD if broken else {key: value for key, value in result.items() if value is not BAD}

    def _entry(self, node: Map, key: str, at: str, report: Report) -> Any:
        inner = f"{at}.{key}" if at else key
        schema = self.fields.get(key)
        if schema is None and self.rest is not None:
            return self.rest.entry(node, key, at, report)
        if schema is None:
            known = ", ".join(self.fields)
            return report.add(inner, f"unknown key{nearest(key, self.fields)}; known: {known}", node.keys[key])
        return schema.read(node.entries[key], inner, report)

    def json_schema(self) -> dict[str, Any]:
        """Return the rule as JSON Schema."""
        properties = {key: schema.json_schema() for key, schema in self.fields.items()}
        others: Any = self.rest.value.json_schema() if self.rest else False
        schema: dict[str, Any] = {"type": "object", "properties": properties, "additionalProperties": others}
        return schema | ({"required": list(self.required)} if self.required else {})


@dataclass(frozen=True)
class Either(Schema):
    """One rule for scalars, others for lists and mappings."""

    scalar: Schema | None = None
    sequence: Schema | None = None
    mapping: Schema | None = None

    @property
    def expected(self) -> str:  # type: ignore[override]
        """What is accepted, in words."""
        return " or ".join(schema.expected for schema in (self.scalar, self.sequence, self.mapping) if schema)

    def read(self, node: Node, at: str, report: Report) -> Any:
        """Return what the rule for the node's kind makes of it."""
        kinds = {Scalar: self.scalar, Sequence: self.sequence, Map: self.mapping}
        schema = kinds[type(node)]
        if schema is None:
            report.places[at] = node
            return self.wrong(node, at, report)
        return schema.read(node, at, report)

    def json_schema(self) -> dict[str, Any]:
        """Return the rule as JSON Schema."""
        return {"anyOf": [s.json_schema() for s in (self.scalar, self.sequence, self.mapping) if s]}

"""What a call of a kernel looks like: axes, tensors, scalars, options, dims and checks; the part of a spec that ships.

The build side makes signatures from specs; the runtime reads them from manifests. Loading is cheap and strict, and
uses only the standard library and the leaves.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from tkbuild.dtypes import DTYPES
from tkbuild.errors import ArgumentError, IntegrityError
from tkbuild.expr import INT64_MAX, INT64_MIN, Expr

AxisValue = bool | int | str
Default = bool | int | float | None

AXIS_TYPES = ("dtype", "int", "str", "bool")
CHOOSE_RULES = ("at_least", "equal", "divides")
ROLES = ("in", "out", "inout", "workspace")
INTEGER_RANGES = {
    "int32": (-(2**31), 2**31 - 1),
    "uint32": (0, 2**32 - 1),
    "int64": (INT64_MIN, INT64_MAX),
    "uint64": (0, INT64_MAX),
}
FACTS = ("num_sms",)
"""Launch-time facts that expressions may use: the SM count, or the limit set for it."""

_T = TypeVar("_T")


@dataclass(frozen=True)
class Choose:
    """How the value of an axis follows from a call.

    Rules, over the values that were built: 'at_least' takes the smallest one >= ``of``, 'equal' the one == ``of``,
    'divides' the largest one that divides ``of``.
    """

    rule: str
    of: Expr

    def pick(self, built: tuple[int, ...], wanted: int) -> int | None:
        """Return the value of ``built`` that the rule picks for ``wanted`` (the value of ``of``), or None."""
        if self.rule == "at_least":
            return min((value for value in built if value >= wanted), default=None)
        if self.rule == "divides":
            return max((value for value in built if wanted % value == 0), default=None)
        return wanted if wanted in built else None


@dataclass(frozen=True)
class AxisSpec:
    """One compile-time choice. ``tag`` precedes its value in variant ids; with ``choose`` it is no call argument."""

    name: str
    type: str
    tag: str
    values: tuple[AxisValue, ...]
    choose: Choose | None = None

    def token(self, value: AxisValue) -> str:
        """Return the part of a variant id that stands for ``value``: ``bf16``, ``b128``, ``packed1``."""
        if self.type == "dtype":
            return self.tag + DTYPES[str(value)].short
        return self.tag + str(int(value) if isinstance(value, bool) else value)


@dataclass(frozen=True)
class DtypeRule:
    """The dtype of a tensor: ``name`` is a dtype or a dtype axis; with ``by_value``, any axis, whose value it maps."""

    name: str
    by_value: tuple[tuple[str, str], ...] = ()

    def resolve(self, axes: Mapping[str, AxisValue]) -> str:
        """Return the dtype name for a variant's ``axes``. Raises: ArgumentError for an axis or value it lacks."""
        if not self.by_value:
            return str(axes.get(self.name, self.name))
        value = axis_text(axes[self.name]) if self.name in axes else None
        for key, dtype in self.by_value:
            if key == value:
                return dtype
        raise ArgumentError(f"no dtype for {self.name}={value}", axis=self.name, value=value)


@dataclass(frozen=True)
class AllocSpec:
    """How an output with run-time strides is allocated: ``strides`` per dimension and the storage, in elements."""

    strides: tuple[Expr, ...]
    elems: Expr


@dataclass(frozen=True)
class ArgSpec:
    """One tensor argument. ``strides`` None means C-contiguous; ``align`` is the data pointer's, in bytes.

    folds: a call may give a tensor of more dimensions, or one fewer; ``runtime.fold`` has the rule.
    """

    name: str
    role: str
    dtype: DtypeRule
    shape: tuple[Expr, ...]
    strides: tuple[Expr, ...] | None = None
    align: int = 16
    optional: bool = False
    alloc: AllocSpec | None = None
    folds: bool = False


@dataclass(frozen=True)
class ValueSpec:
    """One value of a call that is no tensor. ``default`` None means that every call gives it."""

    name: str
    dtype: str
    default: Default = None
    doc: str = ""


@dataclass(frozen=True)
class ScalarSpec(ValueSpec):
    """A kernel parameter."""


@dataclass(frozen=True)
class OptionSpec(ValueSpec):
    """A host-side value: expressions may use it, the kernel never sees it."""


@dataclass(frozen=True)
class DimSpec:
    """The kernel's integer type and optional inclusive bounds of a dimension or stride that binds at a call."""

    name: str
    dtype: str = "int32"
    min: int | None = None
    max: int | None = None


@dataclass(frozen=True)
class CheckSpec:
    """A condition on a call, with the text of its source and the reason given when it does not hold."""

    require: Expr
    text: str
    because: str


@dataclass(frozen=True)
class KernelSignature:
    """Everything about a kernel that a caller and the runtime need to know."""

    kernel: str
    summary: str
    source: str
    op: str
    axes: tuple[AxisSpec, ...] = ()
    args: tuple[ArgSpec, ...] = ()
    scalars: tuple[ScalarSpec, ...] = ()
    options: tuple[OptionSpec, ...] = ()
    dims: tuple[DimSpec, ...] = ()
    checks: tuple[CheckSpec, ...] = ()
    _bound: tuple[DimSpec, ...] = field(default=(), init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_bound", _bound_dims(self))

    @property
    def call_axes(self) -> tuple[AxisSpec, ...]:
        """The axes that a call gives; the others follow from it by their ``choose`` rule."""
        return tuple(axis for axis in self.axes if axis.choose is None)

    @property
    def inferred_axes(self) -> dict[str, int]:
        """The axes that the dtype of a given tensor decides, with the position of the first tensor that does."""
        found: dict[str, int] = {}
        for index, arg in enumerate(self.args):
            if arg.role in ("in", "inout") and not arg.optional and any(axis.name == arg.dtype.name for axis in self.axes):
                found.setdefault(arg.dtype.name, index)
        return found

    @property
    def given_axes(self) -> tuple[AxisSpec, ...]:
        """The axes that a call must name: neither chosen by rule nor decided by a tensor's dtype."""
        inferred = self.inferred_axes
        return tuple(axis for axis in self.call_axes if axis.name not in inferred)

    @property
    def values(self) -> tuple[ValueSpec, ...]:
        """Scalars, then options: the order in which a launch takes them."""
        return (*self.scalars, *self.options)

    @property
    def static_names(self) -> tuple[str, ...]:
        """The axes that a call must name, then the options: what decides the variant and its outputs beside the tensors."""
        return tuple(axis.name for axis in self.given_axes) + tuple(option.name for option in self.options)

    @property
    def bound_dims(self) -> tuple[DimSpec, ...]:
        """The dimensions and strides that bind at a call, in the order in which they do."""
        return self._bound

    def to_json(self) -> dict[str, Any]:
        """Return the JSON object of the manifest; the kernel's name is its key there, not part of it."""
        return {
            "summary": self.summary,
            "source": self.source,
            "op": self.op,
            "axes": [_axis_to_json(axis) for axis in self.axes],
            "args": [_arg_to_json(arg) for arg in self.args],
            "scalars": [_scalar_to_json(scalar) for scalar in self.scalars],
            "options": [_scalar_to_json(option) for option in self.options],
            "dims": {dim.name: _dim_to_json(dim) for dim in self.dims},
            "checks": [{"require": c.require.to_json(), "text": c.text, "because": c.because} for c in self.checks],
        }

    @classmethod
    def from_json(cls, kernel: str, value: object) -> KernelSignature:
        """Return the signature of ``kernel`` from its JSON object. Raises: IntegrityError if that is malformed."""
        try:
            return _signature_from_json(kernel, _Fields(value, f"signature of {kernel}"))
        except ArgumentError as exc:
            raise IntegrityError(f"signature of {kernel}: {exc.message}", kernel=kernel) from exc


def axis_text(value: AxisValue) -> str:
    """Return an axis value as text: the key of dtype maps."""
    return ("true" if value else "false") if isinstance(value, bool) else str(value)


def _bound_dims(signature: KernelSignature) -> tuple[DimSpec, ...]:
    """Return what binds: bare new names in shapes of in and inout tensors, and in strides of any tensor."""
    axes, scalars, options = signature.axes, signature.scalars, signature.options
    given = {*(a.name for a in axes), *(s.name for s in scalars), *(o.name for o in options), *FACTS}
    declared = {dim.name: dim for dim in signature.dims}
    bound: dict[str, DimSpec] = {}
    for arg in signature.args:
        binding = (*(arg.shape if arg.role in ("in", "inout") else ()), *(arg.strides or ()))
        for name in (expr.node for expr in binding):
            if isinstance(name, str) and name not in given:
                bound.setdefault(name, declared.get(name) or DimSpec(name))
    return tuple(bound.values())


# ---- to JSON


def _axis_to_json(axis: AxisSpec) -> dict[str, Any]:
    choose = {"rule": axis.choose.rule, "of": axis.choose.of.to_json()} if axis.choose else None
    return {"name": axis.name, "type": axis.type, "tag": axis.tag, "values": list(axis.values), "choose": choose}


def _arg_to_json(arg: ArgSpec) -> dict[str, Any]:
    alloc = arg.alloc and {"strides": _exprs_to_json(arg.alloc.strides), "elems": arg.alloc.elems.to_json()}
    return {
        "name": arg.name,
        "role": arg.role,
        "dtype": _dtype_to_json(arg.dtype),
        "shape": _exprs_to_json(arg.shape),
        "strides": None if arg.strides is None else _exprs_to_json(arg.strides),
        "align": arg.align,
        "optional": arg.optional,
        "alloc": alloc,
        **({"folds": True} if arg.folds else {}),
    }


def _exprs_to_json(exprs: tuple[Expr, ...]) -> list[Any]:
    return [expr.to_json() for expr in exprs]


def _dtype_to_json(rule: DtypeRule) -> Any:
    return {"axis": rule.name, "map": dict(rule.by_value)} if rule.by_value else rule.name


def _scalar_to_json(scalar: ValueSpec) -> dict[str, Any]:
    return {"name": scalar.name, "dtype": scalar.dtype, "default": scalar.default, "doc": scalar.doc}


def _dim_to_json(dim: DimSpec) -> dict[str, Any]:
    return {"dtype": dim.dtype, "min": dim.min, "max": dim.max}


# ---- from JSON


class _Fields:
    """A JSON object whose fields are read by type, and of which none may be left over."""

    def __init__(self, value: object, where: str) -> None:
        if not isinstance(value, dict):
            raise IntegrityError(f"{where}: expected an object", where=where)
        self._left = dict(value)
        self._where = where

    def take(self, name: str, *types: type) -> Any:
        """Return field ``name``, which must be of one of ``types``; a bool is not an int here."""
        value = self._left.pop(name, _MISSING)
        if type(value) not in types:
            expected = " or ".join(kind.__name__ for kind in types)
            raise IntegrityError(f"{self._where}.{name}: expected {expected}", where=self._where, field=name)
        return value

    def flag(self, name: str) -> bool:
        """Return the bool ``name``, False where it is left out."""
        return bool(self.take(name, bool)) if name in self._left else False

    def each(self, name: str, read: Callable[[_Fields], _T]) -> tuple[_T, ...]:
        """Return what ``read`` makes of each object in the list ``name``."""
        items = self.take(name, list)
        return tuple(self._whole(item, f"{self._where}.{name}[{i}]", read) for i, item in enumerate(items))

    def nested(self, name: str, read: Callable[[_Fields], _T]) -> _T | None:
        """Return what ``read`` makes of the object ``name``, or None for null."""
        value = self.take(name, dict, type(None))
        return None if value is None else self._whole(value, f"{self._where}.{name}", read)

    def exprs(self, name: str) -> tuple[Expr, ...]:
        """Return the list of expressions ``name``."""
        return tuple(Expr.from_json(value) for value in self.take(name, list))

    def expr(self, name: str) -> Expr:
        """Return the expression ``name``."""
        return Expr.from_json(self.take(name, int, str, list))

    def close(self) -> None:
        """Refuse fields that nobody took."""
        if self._left:
            raise IntegrityError(f"{self._where}: unknown fields {', '.join(map(str, self._left))}", where=self._where)

    @staticmethod
    def _whole(value: object, where: str, read: Callable[[_Fields], _T]) -> _T:
        fields = _Fields(value, where)
        result = read(fields)
        fields.close()
        return result


_MISSING = object()
_NULL = type(None)


def _signature_from_json(kernel: str, fields: _Fields) -> KernelSignature:
    dims = fields.take("dims", dict)
    signature = KernelSignature(
        kernel=kernel,
        summary=fields.take("summary", str),
        source=fields.take("source", str),
        op=fields.take("op", str),
        axes=fields.each("axes", _axis_from_json),
        args=fields.each("args", _arg_from_json),
        scalars=fields.each("scalars", functools.partial(_scalar_from_json, ScalarSpec)),
        options=fields.each("options", functools.partial(_scalar_from_json, OptionSpec)),
        dims=tuple(_dim_from_json(name, _Fields(dims[name], f"signature of {kernel}.dims.{name}")) for name in dims),
        checks=fields.each("checks", _check_from_json),
    )
    fields.close()
    return signature


def _axis_from_json(fields: _Fields) -> AxisSpec:
    values = tuple(fields.take("values", list))
    if not values or any(type(value) not in (bool, int, str) for value in values):
        raise IntegrityError("an axis has a list of numbers, texts or truth values as values", values=values)
    return AxisSpec(
        name=fields.take("name", str),
        type=_one_of(fields.take("type", str), AXIS_TYPES),
        tag=fields.take("tag", str),
        values=values,
        choose=fields.nested("choose", lambda f: Choose(_one_of(f.take("rule", str), CHOOSE_RULES), f.expr("of"))),
    )


def _arg_from_json(fields: _Fields) -> ArgSpec:
    name, role = fields.take("name", str), _one_of(fields.take("role", str), ROLES)
    dtype, shape = _dtype_from_json(fields.take("dtype", str, dict)), fields.exprs("shape")
    strides = fields.take("strides", list, _NULL)
    return ArgSpec(
        name=name,
        role=role,
        dtype=dtype,
        shape=shape,
        strides=None if strides is None else tuple(map(Expr.from_json, strides)),
        align=fields.take("align", int),
        optional=fields.take("optional", bool),
        alloc=fields.nested("alloc", lambda f: AllocSpec(f.exprs("strides"), f.expr("elems"))),
        folds=fields.flag("folds"),
    )


def _dtype_from_json(value: str | dict[str, Any]) -> DtypeRule:
    if isinstance(value, str):
        return DtypeRule(value)
    fields = _Fields(value, "dtype")
    rule = DtypeRule(fields.take("axis", str), tuple(fields.take("map", dict).items()))
    fields.close()
    if not rule.by_value or not all(isinstance(dtype, str) for _, dtype in rule.by_value):
        raise IntegrityError("a dtype map has dtype names as values", axis=rule.name)
    return rule


def _scalar_from_json(cls: Callable[[str, str, Default, str], _T], fields: _Fields) -> _T:
    default = fields.take("default", bool, int, float, _NULL)
    return cls(fields.take("name", str), fields.take("dtype", str), default, fields.take("doc", str))


def _dim_from_json(name: str, fields: _Fields) -> DimSpec:
    dim = DimSpec(name, fields.take("dtype", str), fields.take("min", int, _NULL), fields.take("max", int, _NULL))
    fields.close()
    return dim


def _check_from_json(fields: _Fields) -> CheckSpec:
    return CheckSpec(fields.expr("require"), fields.take("text", str), fields.take("because", str))


def _one_of(value: str, allowed: tuple[str, ...]) -> str:
    if value not in allowed:
        raise IntegrityError(f"{value!r} is none of {', '.join(allowed)}", value=value)
    return value

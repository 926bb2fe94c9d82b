"""What a kernel spec says: its values, the schema of its file, and how the one is built from the other."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tkbuild.arch import TargetArch
from tkbuild.checks import Bench, Case, CaseValue, Tolerance, Verify
from tkbuild.expr import Expr
from tkbuild.schema import (
    BAD,
    Bool,
    Either,
    Enum,
    Exactly,
    Expression,
    Int,
    ListOf,
    MapOf,
    Node,
    Number,
    Object,
    Plain,
    Report,
    Text,
)
from tkbuild.signature import (
    AXIS_TYPES,
    CHOOSE_RULES,
    ROLES,
    AllocSpec,
    ArgSpec,
    AxisSpec,
    AxisValue,
    CheckSpec,
    Choose,
    DimSpec,
    DtypeRule,
    KernelSignature,
    OptionSpec,
    ScalarSpec,
)
from tkbuild.speccheck import CASE_KEYS, check_profile, check_spec, template_name

PlainValue = Any
"""A literal of a spec: bool, int, float, str, None, a tuple of such, or a mapping of such by name."""
SCALAR_DTYPES = ("int32", "int64", "uint32", "uint64", "float32", "float64", "bool")
OPTION_DTYPES = ("int32", "int64", "bool")


# ---- values


@dataclass(frozen=True)
class Constraint:
    """A condition over the axes; combinations for which it does not hold are not built."""

    require: Expr
    because: str


@dataclass(frozen=True)
class Target:
    """How a kernel is built for one arch: its tuning, seen by the template, and which template that is."""

    arch: TargetArch
    tuning: Mapping[str, PlainValue]
    template: Path


@dataclass(frozen=True)
class Allow:
    """The most bytes a thread may spill, and may have as stack, before a variant fails the build."""

    spill_bytes: int = 0
    stack_bytes: int = 0


@dataclass(frozen=True, eq=False)
class KernelSpec:
    """One kernel: what its callers see (``signature``), and how it is built, verified and measured."""

    path: Path
    signature: KernelSignature
    constants: Mapping[str, PlainValue]
    sources: tuple[Path, ...]
    constraints: tuple[Constraint, ...]
    targets: Mapping[TargetArch, Target]
    pass_configs: Mapping[str, bool | int | float | str]
    compile_flags: tuple[str, ...]
    allow: Allow
    programmatic: str
    reference: str | None
    verify: Verify | None
    bench: Bench | None

    @property
    def name(self) -> str:
        """The kernel's name: ``family.kernel``."""
        return self.signature.kernel

    @property
    def folder(self) -> Path:
        """The folder of the spec, the only one its template can include from."""
        return self.path.parent

    def combinations(self) -> Iterator[dict[str, AxisValue]]:
        """Yield the axis values of every combination that the constraints admit, in spec order."""
        names = [axis.name for axis in self.signature.axes]
        for values in itertools.product(*(axis.values for axis in self.signature.axes)):
            axes = dict(zip(names, values, strict=True))
            if all(constraint.require.evaluate(axes) for constraint in self.constraints):
                yield axes


@dataclass(frozen=True)
class Profile:
    """What to build: patterns over kernel names and ids, and for some kernels a restriction of axis values."""

    name: str
    path: Path
    kernels: tuple[str, ...]
    axes: Mapping[str, Mapping[str, tuple[AxisValue, ...]]]
    wheel: str = ""
    """Distribution name of the wheels, without the arch; empty for tkbuild's own."""


# ---- the file's schema

_NAME = Text("[A-Za-z][A-Za-z0-9_]*", "a name of letters, digits and '_'")
_KERNEL = Text("[a-z][a-z0-9_]*[.][a-z][a-z0-9_]*", "family.name in lower case, without '-'")
_FILE = Text("[A-Za-z0-9_][A-Za-z0-9_.]*", "the name of a file beside the spec")
_DTYPE_NAME = Text("[a-z0-9_]+", "a dtype name")
_SAID = Text("(?s:.+)", "text that is not empty")
_EXPR = Expression()
_BYTES = Int(0, 2**31 - 1)
_CHOOSE = Object({"rule": Enum(CHOOSE_RULES), "of": _EXPR}, ("rule", "of"))
_AXIS = Object(
    {
        "type": Enum(AXIS_TYPES),
        "tag": Text("[a-z_]*", "lower-case letters"),
        "values": ListOf(Plain(), 1),
        "choose": _CHOOSE,
    },
    ("type", "values"),
)
_DTYPE = Either(
    scalar=Text("[A-Za-z0-9_]+", "a dtype or the name of a dtype axis"),
    mapping=Object({"axis": _NAME, "map": MapOf(Text(), _DTYPE_NAME, 1)}, ("axis", "map"), expected="{axis: .., map: ..}"),
)
_ARG = Object(
    {
        "role": Enum(ROLES),
        "dtype": _DTYPE,
        "shape": ListOf(_EXPR),
        "strides": ListOf(_EXPR),
        "align": Int(1, 1024),
        "optional": Bool(),
        "folds": Bool(),
        "alloc": Object({"strides": ListOf(_EXPR), "elems": _EXPR}, ("strides", "elems")),
    },
    ("role", "dtype", "shape"),
)
_DIM = Object(
    {"dtype": Enum(("int32", "int64")), "min": Int(0), "max": Int(0)},
    hint="; it is a run-time value, and a number would fix it: use an axis for a compile-time value",
)
_CHECK = Object({"require": _EXPR, "because": _SAID}, ("require", "because"))
_TUNING = MapOf(_NAME, Plain(nested=True))
_TOLERANCE = Either(Enum(("exact",)), mapping=Object({"atol": Number(), "rtol": Number()}, expected="{atol: .., rtol: ..}"))
_FILL = MapOf(_NAME, Text("[a-z][a-z0-9_]*([(].*[)])?", "a fill such as normal or uniform(-1, 1)"))
_CASE = Object(
    {"why": Text(), "large": Bool(), "inputs": _FILL},
    rest=MapOf(_NAME, Either(Plain(), ListOf(Plain(), 1))),
    expected="a mapping of names to values",
)

SPEC = Object(
    {
        "spec": Exactly(1),
        "kernel": _KERNEL,
        "summary": _SAID,
        "source": Text(),
        "template": _FILE,
        "constants": MapOf(_NAME, Plain(nested=True)),
        "sources": ListOf(_FILE),
        "axes": MapOf(_NAME, _AXIS),
        "constraints": ListOf(_CHECK),
        "args": MapOf(_NAME, _ARG, 1),
        "scalars": MapOf(_NAME, Object({"dtype": Enum(SCALAR_DTYPES), "default": Plain(), "doc": Text()}, ("dtype",))),
        "options": MapOf(_NAME, Object({"dtype": Enum(OPTION_DTYPES), "default": Plain(), "doc": Text()}, ("dtype",))),
        "dims": MapOf(_NAME, _DIM),
        "checks": ListOf(_CHECK),
        "launch": Object({"programmatic": Enum(("off", "setting", "on"))}),
        "targets": MapOf(Text("sm_[a-z0-9]+", "an arch such as sm_90a"), Either(Plain(), mapping=_TUNING), 1),
        "pass_configs": MapOf(Text("[a-z]+([.][A-Za-z0-9_]+)+", "a pass config such as tl.enable_fast_math"), Plain()),
        "compile_flags": ListOf(Text("-.+", "a compiler flag, which starts with '-'")),
        "allow": Object({"spill_bytes": _BYTES, "stack_bytes": _BYTES}),
        "op": Object({"name": Text("[a-z][a-z0-9_]*", "a lower-case name")}),
        "reference": Text("[a-z][a-z0-9_]*[.][a-z][a-z0-9_]*|[a-z0-9_.]+:[a-z0-9_]+", "family.function or module:function"),
        "verify": Object(
            {
                "tolerance": MapOf(_NAME, _TOLERANCE),
                "inputs": _FILL,
                "cases": ListOf(_CASE, 1),
            },
            ("cases",),
        ),
        "bench": Object({"bytes": _EXPR, "flops": _EXPR, "workloads": ListOf(_CASE, 1)}, ("workloads",)),
    },
    ("spec", "kernel", "summary", "args", "targets"),
)

# A file that lacks a required key is still read, so that all its problems are reported together.
_ANY_PART = Object(SPEC.fields)

PROFILE = Object(
    {
        "profile": Text("[a-z][a-z0-9_-]*", "a lower-case name"),
        "summary": Text(),
        "wheel": Text("[a-z][a-z0-9]*(-[a-z0-9]+)*", "a distribution name of lower-case letters, digits and single '-'"),
        "kernels": ListOf(Text("[^ ]+", "a pattern"), 1),
        "axes": MapOf(_KERNEL, MapOf(_NAME, ListOf(Plain(), 1))),
    },
    ("profile", "kernels"),
)


def json_schema() -> dict[str, Any]:
    """Return the JSON Schema (draft 2020-12) of kernel specs, for editors and for other tools."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "tkbuild kernel spec",
        **SPEC.json_schema(),
    }


# ---- from the file's values to ours


def build_spec(path: Path, root: Node, report: Report) -> KernelSpec | None:
    """Return the spec that the tree ``root`` of the file ``path`` describes, or None after reporting all problems."""
    given = _ANY_PART.read(root, "", report)
    if given is BAD:
        return None
    for key in SPEC.required:
        if key not in report.places:
            report.add("", f"missing key {key!r}: expected {SPEC.fields[key].expected}", root)
    check_spec(path, given, report)
    return None if report.problems else _spec(path, given, report)


def _spec(path: Path, given: dict[str, Any], report: Report) -> KernelSpec:
    """Return the spec of values that have been found right."""
    template = given.get("template") or template_name(given["kernel"])
    return KernelSpec(
        path=path,
        signature=_signature(given),
        constants=given.get("constants", {}),
        sources=tuple(path.parent / name for name in given.get("sources", ())),
        constraints=tuple(Constraint(item["require"], item["because"]) for item in given.get("constraints", ())),
        targets=_targets(path.parent, template, given["targets"]),
        pass_configs=given.get("pass_configs", {}),
        compile_flags=given.get("compile_flags", ()),
        allow=Allow(**given.get("allow", {})),
        programmatic=given.get("launch", {}).get("programmatic", "off"),
        reference=given.get("reference"),
        verify=_verify(given),
        bench=_bench(given),
    )


def _targets(folder: Path, template: str, given: dict[str, Any]) -> dict[TargetArch, Target]:
    targets = {}
    for name in given:
        tuning = dict(given[name] or {})
        file = folder / tuning.pop("template", template)
        arch = TargetArch.parse(name)
        targets[arch] = Target(arch, tuning, file)
    return dict(sorted(targets.items()))


def _signature(given: dict[str, Any]) -> KernelSignature:
    kernel = given["kernel"]
    return KernelSignature(
        kernel=kernel,
        summary=" ".join(given["summary"].split()),
        source=" ".join(given.get("source", "").split()),
        op=given.get("op", {}).get("name") or kernel.replace(".", "_"),
        axes=tuple(axis_spec(name, value) for name, value in given.get("axes", {}).items()),
        args=tuple(arg_spec(name, value) for name, value in given["args"].items()),
        scalars=tuple(ScalarSpec(name, **_scalar(value)) for name, value in given.get("scalars", {}).items()),
        options=tuple(OptionSpec(name, **value) for name, value in given.get("options", {}).items()),
        dims=tuple(_dim(name, value) for name, value in given.get("dims", {}).items()),
        checks=tuple(CheckSpec(c["require"], str(c["require"]), c["because"]) for c in given.get("checks", ())),
    )


def axis_spec(name: str, given: dict[str, Any]) -> AxisSpec:
    """Return the axis ``name``. Without a tag, numbers and truth values have the axis's name before them in ids."""
    tag = given.get("tag", name if given["type"] in ("int", "bool") else "")
    choose = Choose(**given["choose"]) if "choose" in given else None
    return AxisSpec(name, given["type"], tag, given["values"], choose)


def arg_spec(name: str, given: dict[str, Any]) -> ArgSpec:
    """Return the tensor argument ``name``."""
    fields = {key: given[key] for key in ("role", "shape", "strides", "align", "optional", "folds") if key in given}
    alloc = AllocSpec(**given["alloc"]) if "alloc" in given else None
    return ArgSpec(name, dtype=dtype_rule(given["dtype"]), alloc=alloc, **fields)


def dtype_rule(given: str | dict[str, Any]) -> DtypeRule:
    """Return the rule that a ``dtype`` key states."""
    return DtypeRule(given) if isinstance(given, str) else DtypeRule(given["axis"], tuple(given["map"].items()))


def _scalar(given: dict[str, Any]) -> dict[str, Any]:
    default = given.get("default")
    if default is None or not given["dtype"].startswith("float"):
        return given
    return {**given, "default": float(default)}


def _dim(name: str, given: dict[str, Any]) -> DimSpec:
    return DimSpec(name, given.get("dtype", "int32"), given.get("min"), given.get("max"))


def _verify(given: dict[str, Any]) -> Verify | None:
    if "verify" not in given:
        return None
    verify = given["verify"]
    outputs = [name for name, arg in given["args"].items() if arg["role"] in ("out", "inout")]
    stated = {name: Tolerance() if value == "exact" else Tolerance(**value) for name, value in verify.get("tolerance", {}).items()}
    tolerance = {name: stated.get(name, Tolerance()) for name in outputs}
    return Verify(tolerance, verify.get("inputs", {}), tuple(_case(case, given) for case in verify["cases"]))


def _bench(given: dict[str, Any]) -> Bench | None:
    if "bench" not in given:
        return None
    bench = given["bench"]
    workloads = tuple(_case(case, given) for case in bench["workloads"])
    return Bench(bench.get("bytes"), bench.get("flops", Expr(0)), workloads)


def _case(case: dict[str, Any], given: dict[str, Any]) -> Case:
    axes = given.get("axes", {})
    values = {name: value if isinstance(value, tuple) else (value,) for name, value in case.items() if name not in CASE_KEYS}
    parsed = {name: vs if name in axes else tuple(map(_case_value, vs)) for name, vs in values.items()}
    return Case(case.get("why", ""), parsed, case.get("large", False), case.get("inputs"))


def _case_value(value: Any) -> CaseValue | Expr:
    return Expr.parse(value) if isinstance(value, str) else value


def build_profile(path: Path, root: Node, report: Report) -> Profile | None:
    """Return the profile that the tree ``root`` of the file ``path`` describes, or None after reporting all problems."""
    given = PROFILE.read(root, "", report)
    if given is BAD:
        return None
    check_profile(path, given, report)
    return (
        None
        if report.problems
        else Profile(given["profile"], path, given["kernels"], given.get("axes", {}), given.get("wheel", ""))
    )

"""What `verify` and `bench` run: cases, tolerances and workloads, from the spec through the wheel to the GPU machine.

A leaf: the build side writes it as JSON into a wheel (``checks.json``), the GPU side reads it back, without YAML.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tkbuild.errors import ArgumentError, IntegrityError
from tkbuild.expr import Expr
from tkbuild.signature import AxisValue

PlainValue = bool | int | float | str
CaseValue = bool | int | float | str

Json = Any


@dataclass(frozen=True)
class Tolerance:
    """How far an output may be from its reference; both 0 means bit for bit."""

    atol: float = 0.0
    rtol: float = 0.0

    @property
    def exact(self) -> bool:
        """Whether the outputs' bytes are compared."""
        return self.atol == self.rtol == 0.0


@dataclass(frozen=True)
class Case:
    """Calls to verify or measure: for each name (dim, stride, scalar, option, axis) the values it takes; lists multiply.

    large: the call needs tens of gigabytes, and is left out unless asked for.  inputs: fills that replace the spec's.
    """

    why: str
    values: Mapping[str, tuple[CaseValue | Expr, ...]]
    large: bool = False
    inputs: Mapping[str, str] | None = None

    def calls(self, axes: Mapping[str, AxisValue]) -> Iterator[dict[str, CaseValue]]:
        """Yield the names of each call with their values, for a variant with ``axes``; none if an axis excludes it.

        Raises: ArgumentError for expressions that need each other or have no value.
        """
        for values in itertools.product(*self.values.values()):
            call = dict(zip(self.values, values, strict=True))
            if all(call[name] == axes[name] for name in call if name in axes):
                yield _evaluated(call, axes)


def _evaluated(call: Mapping[str, CaseValue | Expr], axes: Mapping[str, AxisValue]) -> dict[str, CaseValue]:
    known = {name: value for name, value in call.items() if not isinstance(value, Expr)}
    waiting = {name: value for name, value in call.items() if isinstance(value, Expr)}
    while waiting:
        ready = [name for name, expr in waiting.items() if expr.names() <= known.keys() | axes.keys()]
        if not ready:
            raise ArgumentError(f"no order in which {', '.join(sorted(waiting))} can be computed", names=sorted(waiting))
        known |= {name: waiting.pop(name).evaluate({**axes, **known}) for name in ready}
    return {name: known[name] for name in call}


@dataclass(frozen=True)
class Verify:
    """How a kernel is compared with its reference: tolerances per output, fills per input, and calls."""

    tolerance: Mapping[str, Tolerance]
    inputs: Mapping[str, PlainValue]
    cases: tuple[Case, ...]


@dataclass(frozen=True)
class Bench:
    """What a call moves and computes, as expressions over its names, and the calls that are measured.

    ``moved_bytes`` None stands for every tensor once, inout tensors twice.
    """

    moved_bytes: Expr | None
    flops: Expr
    workloads: tuple[Case, ...]


@dataclass(frozen=True)
class KernelChecks:
    """One kernel's reference (``family.function`` of `tkbuild.reference`), verify cases and bench workloads."""

    reference: str | None
    verify: Verify | None
    bench: Bench | None

    def to_json(self) -> dict[str, Json]:
        return {"reference": self.reference, "verify": _verify_to_json(self.verify), "bench": _bench_to_json(self.bench)}

    @classmethod
    def from_json(cls, value: Mapping[str, Json]) -> KernelChecks:
        """Raises: IntegrityError for a malformed object."""
        try:
            return cls(value["reference"], _verify_from_json(value["verify"]), _bench_from_json(value["bench"]))
        except (KeyError, TypeError, AttributeError, ArgumentError) as exc:
            raise IntegrityError(f"malformed checks: {type(exc).__name__}: {exc}") from exc


def _verify_to_json(verify: Verify | None) -> Json:
    if verify is None:
        return None
    return {
        "tolerance": {name: {"atol": t.atol, "rtol": t.rtol} for name, t in verify.tolerance.items()},
        "inputs": dict(verify.inputs),
        "cases": [_case_to_json(case) for case in verify.cases],
    }


def _verify_from_json(value: Json) -> Verify | None:
    if value is None:
        return None
    tolerance = {name: Tolerance(item["atol"], item["rtol"]) for name, item in value["tolerance"].items()}
    return Verify(tolerance, value["inputs"], tuple(map(_case_from_json, value["cases"])))


def _bench_to_json(bench: Bench | None) -> Json:
    if bench is None:
        return None
    return {
        "bytes": None if bench.moved_bytes is None else bench.moved_bytes.to_json(),
        "flops": bench.flops.to_json(),
        "workloads": [_case_to_json(case) for case in bench.workloads],
    }


def _bench_from_json(value: Json) -> Bench | None:
    if value is None:
        return None
    moved = None if value["bytes"] is None else Expr.from_json(value["bytes"])
    return Bench(moved, Expr.from_json(value["flops"]), tuple(map(_case_from_json, value["workloads"])))


def _case_to_json(case: Case) -> Json:
    values = {name: [_value_to_json(value) for value in values] for name, values in case.values.items()}
    return {"why": case.why, "values": values, "large": case.large, "inputs": case.inputs and dict(case.inputs)}


def _case_from_json(value: Json) -> Case:
    values = {name: tuple(map(_value_from_json, values)) for name, values in value["values"].items()}
    return Case(value["why"], values, value["large"], value["inputs"])


def _value_to_json(value: CaseValue | Expr) -> Json:
    return {"expr": value.to_json()} if isinstance(value, Expr) else value


def _value_from_json(value: Json) -> CaseValue | Expr:
    return Expr.from_json(value["expr"]) if isinstance(value, dict) else value

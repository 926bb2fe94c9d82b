"""Launch plans: how one variant is checked and launched, as JSON that the native launcher reads (DESIGN.md section 3)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from tkbuild.arch import TargetArch, target_profile
from tkbuild.errors import LowerError
from tkbuild.expr import Expr
from tkbuild.signature import FACTS, ArgSpec, AxisValue, DimSpec, KernelSignature, ValueSpec

SCHEMA = 1
# CUDA guarantees clusters of 8 CTAs; kernels may opt in to 16.
_MAX_CLUSTER = 16
_TENSOR_MAP_EXPRS = ("dims", "strides", "box", "elem_strides")

Json = Any


def make_launch_plan(
    signature: KernelSignature,
    *,
    variant: str,
    arch: str,
    axes: Mapping[str, AxisValue],
    launch_facts: Mapping[str, Json],
    programmatic: str = "off",
) -> dict[str, Json]:
    """Return the launch plan of a variant from its signature and what lowering found.

    programmatic: the spec's launch mode; it applies to those launches whose kernel waits for or triggers others.
    Raises: LowerError if the kernel uses a pointer or a size that the spec does not name.
    """
    values = {name: value for name, value in axes.items() if isinstance(value, (bool, int, str))}
    plan: dict[str, Json] = {
        "schema": SCHEMA,
        "kernel": signature.kernel,
        "variant": variant,
        "arch": arch,
        "axes": {},
        "args": [*_tensors(signature, axes, values), *_scalars(signature)],
        "dims": {dim.name: _dim(dim) for dim in signature.bound_dims},
        "checks": [
            {"require": check.require.substitute(values).to_json(), "text": check.text, "because": check.because}
            for check in signature.checks
        ],
        "tensor_maps": list(launch_facts["tensor_maps"]),
        "launches": [
            {**launch, "programmatic": programmatic if launch["programmatic"] else "off"} for launch in launch_facts["launches"]
        ],
    }
    _check_names(signature, plan)
    for launch in plan["launches"]:
        _check_limits(variant, arch, launch)
    return plan


def _check_limits(variant: str, arch: str, launch: Mapping[str, Json]) -> None:
    """Refuse a launch that no device of ``arch`` can make. Sizes that only a call decides are left to the driver."""
    profile = target_profile(TargetArch.parse(arch))
    limits = {
        "threads": (launch["block"], profile.max_threads),
        "CTAs of a cluster": (launch["cluster"], _MAX_CLUSTER),
        "bytes of dynamic shared memory": ([launch["dynamic_smem_bytes"]], profile.smem_per_block),
    }
    for what, (sizes, most) in limits.items():
        if all(isinstance(size, int) for size in sizes) and math.prod(sizes) > most:
            raise LowerError(
                f"{variant}: {launch['function']} asks for {math.prod(sizes)} {what}, {arch} has at most {most}; lower the tuning of the spec",
                variant=variant,
            )


def _tensors(
    signature: KernelSignature, axes: Mapping[str, AxisValue], values: Mapping[str, int | str]
) -> Iterator[dict[str, Json]]:
    for arg in signature.args:
        yield {
            "name": arg.name,
            "kind": "tensor",
            "role": arg.role,
            "dtype": arg.dtype.resolve(axes),
            "shape": [expr.substitute(values).to_json() for expr in arg.shape],
            "strides": [expr.substitute(values).to_json() for expr in strides(arg)],
            "align": arg.align,
            "optional": arg.optional,
            **({"folds": True} if arg.folds else {}),
        }


def strides(arg: ArgSpec) -> tuple[Expr, ...]:
    """Return the strides a tensor must have, those of a C-contiguous one where the spec gives none."""
    return default_strides(arg) if arg.strides is None else arg.strides


def default_strides(arg: ArgSpec) -> tuple[Expr, ...]:
    """Return the strides a C-contiguous tensor of this shape has."""
    result: list[Expr] = []
    stride = Expr(1)
    for extent in reversed(arg.shape):
        result.insert(0, stride)
        stride = extent if stride == Expr(1) else Expr(("*", extent.node, stride.node))
    return tuple(result)


def _dim(dim: DimSpec) -> dict[str, Json]:
    bounds = {"min": dim.min, "max": dim.max}
    return {"dtype": dim.dtype, **{name: bound for name, bound in bounds.items() if bound is not None}}


def _scalars(signature: KernelSignature) -> Iterator[dict[str, Json]]:
    kinds: list[tuple[str, Sequence[ValueSpec]]] = [("scalar", signature.scalars), ("option", signature.options)]
    for kind, specs in kinds:
        for spec in specs:
            yield {"name": spec.name, "kind": kind, "dtype": spec.dtype}


def _check_names(signature: KernelSignature, plan: Mapping[str, Json]) -> None:
    tensors = {arg.name for arg in signature.args}
    numbers = {dim.name for dim in signature.bound_dims} | {value.name for value in signature.values} | {*FACTS}
    used_tensors, used_numbers = set(), set()
    for tensor_map in plan["tensor_maps"]:
        used_tensors.add(tensor_map["arg"])
        used_numbers |= _names(expr for key in _TENSOR_MAP_EXPRS for expr in tensor_map[key])
    for launch in plan["launches"]:
        used_tensors |= {param["pointer"] for param in launch["params"] if "pointer" in param}
        used_numbers |= _names(param["value"] for param in launch["params"] if "value" in param)
        used_numbers |= _names([*launch["grid"], *launch["block"], *launch["cluster"], launch["dynamic_smem_bytes"]])
    for what, used, known in (("tensor", used_tensors, tensors), ("size", used_numbers, numbers)):
        if unknown := sorted(used - known):
            raise LowerError(
                f"{plan['variant']}: the template uses the {what} {', '.join(unknown)}, which the spec does not name; "
                f"the spec names: {', '.join(sorted(known)) or 'none'}",
                variant=plan["variant"],
                unknown=unknown,
            )


def _names(exprs: Iterable[Json]) -> set[str]:
    return {name for expr in exprs for name in Expr.from_json(expr).names()}

"""What a call is refused for while it is traced: the launcher's checks, as far as tensors without memory decide them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from tkbuild.errors import ArgumentError
from tkbuild.runtime.fold import fold
from tkbuild.runtime.op import Tensors, dtype_name, given_args
from tkbuild.runtime.registry import InstalledVariant, registry
from tkbuild.runtime.select import Request, select, select_or_raise
from tkbuild.signature import INTEGER_RANGES, ArgSpec, KernelSignature

Given = Sequence[tuple[ArgSpec, torch.Tensor]]


def check_traced(signature: KernelSignature, tensors: Tensors, values: Mapping[str, Any], axes: Mapping[str, Any]) -> None:
    """Refuse what the launcher would refuse for dtypes, devices, values, sizes and variants.

    Sizes that tracing keeps open decide nothing, since a comparison would close them; nor do strides, which compiled code may choose.
    Raises: ArgumentError, NoVariantError.
    """
    given = [(arg, tensor) for arg, tensor in zip(given_args(signature), tensors, strict=True) if tensor is not None]
    _check_devices(signature, given)
    known = _known(signature, {**values, **axes})
    variant = _covering(signature, axes, known, str(given[0][1].device) if given else "no device")
    known |= variant.axes if variant else {}
    _check_dtypes(signature, given, {**axes, **(variant.axes if variant else {})})
    _check_shapes(signature, given, known)
    _check_ranges(signature, known)
    for check in signature.checks:
        if check.require.names() <= known.keys() and not check.require.evaluate(known):
            got = ", ".join(f"{name} = {known[name]}" for name in sorted(check.require.names()))
            because = f": {check.because}" if check.because else ""
            raise ArgumentError(f"{signature.kernel}: requires {check.text}, got {got}{because}", kernel=signature.kernel)


def _check_devices(signature: KernelSignature, given: Given) -> None:
    for arg, tensor in given:
        if tensor.device.type not in ("cuda", "meta"):
            wanted = "a CUDA device; tkbuild.reference has plain torch versions"
        elif tensor.device != given[0][1].device:
            wanted = f"{given[0][1].device}, where the arguments before it are"
        else:
            continue
        raise ArgumentError(
            f"{signature.kernel}: {arg.name} is on {tensor.device}, expected {wanted}", kernel=signature.kernel, argument=arg.name
        )


def _known(signature: KernelSignature, values: Mapping[str, Any]) -> dict[str, Any]:
    """The values that decide something: those of names that only absent tensors bind are 0, as in the launcher."""
    sizes = {str(expr) for arg in signature.args if arg.role in ("in", "inout") for expr in arg.shape if expr.is_name}
    steps = {dim.name for dim in signature.bound_dims} - sizes
    known = {name: value for name, value in values.items() if isinstance(value, (bool, int, float, str)) and name not in steps}
    return known | {dim.name: 0 for dim in signature.bound_dims if dim.name in sizes and dim.name not in values}


def _covering(
    signature: KernelSignature, axes: Mapping[str, Any], known: Mapping[str, Any], device: str
) -> InstalledVariant | None:
    """Return a variant for the call, of any arch; None where open sizes choose it. Raises: NoVariantError if no arch has one."""
    of = {axis.name: axis.choose.of for axis in signature.axes if axis.choose}
    if not all(expr.names() <= known.keys() for expr in of.values()):
        return None
    chosen = {name: expr.evaluate(known) for name, expr in of.items()}
    fitting: list[InstalledVariant] = []
    request = Request(axes, chosen, (0, 0), device)
    candidates = registry().variants.get(signature.kernel, ())
    for arch in sorted({variant.arch for variant in candidates}):
        fitting = [variant for variant in candidates if variant.arch == arch]
        request = replace(request, capability=(arch.major, arch.minor))
        if found := select(signature, fitting, request).variant:
            return found
    return select_or_raise(signature, fitting, request)


def _check_dtypes(signature: KernelSignature, given: Given, axes: Mapping[str, Any]) -> None:
    open_axes = {axis.name for axis in signature.axes} - axes.keys()
    for arg, tensor in given:
        if arg.dtype.name in open_axes or (wanted := arg.dtype.resolve(axes)) == (got := dtype_name(tensor.dtype)):
            continue
        raise ArgumentError(
            f"{signature.kernel}: {arg.name}: dtype {got}, expected {wanted}", kernel=signature.kernel, argument=arg.name
        )


def _check_shapes(signature: KernelSignature, given: Given, known: Mapping[str, Any]) -> None:
    """What ``bind`` could not compare yet: sizes that depend on names of later arguments."""
    for arg, tensor in given:
        shape, _ = fold(arg, tensor.shape, tensor.stride()) or (tensor.shape, ())
        for place, (expr, extent) in enumerate(zip(arg.shape, shape, strict=True)):
            if type(extent) is int and expr.names() <= known.keys() and (wanted := expr.evaluate(known)) != extent:
                raise ArgumentError(
                    f"{signature.kernel}: {arg.name}.shape[{place}] is {extent}, expected {expr} = {wanted}",
                    kernel=signature.kernel,
                    argument=arg.name,
                )


def _check_ranges(signature: KernelSignature, known: Mapping[str, Any]) -> None:
    bounds = {value.name: INTEGER_RANGES[value.dtype] for value in signature.values if value.dtype in INTEGER_RANGES}
    for dim in signature.bound_dims:
        low, high = INTEGER_RANGES[dim.dtype]
        bounds[dim.name] = (low if dim.min is None else dim.min, high if dim.max is None else dim.max)
    for name, (low, high) in bounds.items():
        if name in known and not low <= known[name] <= high:
            raise ArgumentError(
                f"{signature.kernel}: {name} is {known[name]}, expected a value from {low} to {high}", kernel=signature.kernel
            )

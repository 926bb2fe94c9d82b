"""``torch.ops.tkbuild``: schema, CUDA implementation and fake implementation of every installed kernel, from its signature."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch

from tkbuild.errors import ArgumentError, PackageError
from tkbuild.runtime.op import allocations, bind, call_axes, kernel_op
from tkbuild.runtime.registry import registry
from tkbuild.runtime.traced import check_traced
from tkbuild.signature import AxisSpec, KernelSignature, ValueSpec

NAMESPACE = "tkbuild"
_AXIS_TYPES = {"int": "int", "str": "str", "bool": "bool", "dtype": "ScalarType"}

Implementation = Callable[..., Any]


def schema(signature: KernelSignature) -> str:
    """Return the torch schema of a kernel: tensors first, then by keyword the axes it must name, options, scalars.

    ``inout`` tensors are marked as mutated; the ``out`` tensors are returned.
    """
    tensors = []
    for index, arg in enumerate(arg for arg in signature.args if arg.role != "out"):
        mark = f"({chr(ord('a') + index)}!)" if arg.role != "in" else ""
        tensors.append(f"Tensor{mark}{'?' if arg.optional else ''} {arg.name}")
    keywords = [_axis_text(axis) for axis in signature.given_axes]
    keywords += [_value_text(value) for value in (*signature.options, *signature.scalars)]
    parameters = ", ".join([*tensors, *(["*", *keywords] if keywords else [])])
    outs = sum(arg.role == "out" for arg in signature.args)
    result = "Tensor" if outs == 1 else "(" + ", ".join(["Tensor"] * outs) + ")"
    return f"{signature.op}({parameters}) -> {result}"


def _axis_text(axis: AxisSpec) -> str:
    return f"{_AXIS_TYPES[axis.type]} {axis.name}"


def _value_text(value: ValueSpec) -> str:
    kind = {"bool": "bool", "float32": "float", "float64": "float"}.get(value.dtype, "int")
    return f"{kind} {value.name}" + ("" if value.default is None else f"={value.default}")


@functools.cache
def register_torch_ops() -> tuple[str, ...]:
    """Define the op of every installed kernel, once; returns their names.

    The library object is kept for the life of the process, as torch wants it. Raises: PackageError for two kernels with
    one op name.
    """
    _check_op_names(registry().signatures.values())
    library = torch.library.Library(NAMESPACE, "FRAGMENT")
    _KEPT.append(library)
    for signature in registry().signatures.values():
        _register(signature, library)
    return tuple(signature.op for signature in registry().signatures.values())


def _register(signature: KernelSignature, library: torch.library.Library) -> None:
    library.define(schema(signature))
    library.impl(signature.op, _cuda_implementation(signature), "CUDA")
    library.impl(signature.op, _cpu_implementation(signature), "CPU")
    torch.library.register_fake(f"{NAMESPACE}::{signature.op}", _fake_implementation(signature), lib=library)
    op = kernel_op(signature.kernel)
    op.keywords = (*signature.static_names, *(scalar.name for scalar in signature.scalars))
    op.dtype_keywords = tuple(axis.name for axis in signature.given_axes if axis.type == "dtype")
    op.dispatched = getattr(torch.ops.tkbuild, signature.op).default


def _check_op_names(signatures: Iterable[KernelSignature]) -> None:
    kernels: dict[str, str] = {}
    for signature in signatures:
        first = kernels.setdefault(signature.op, signature.kernel)
        if first != signature.kernel:
            raise PackageError(
                f"{first} and {signature.kernel} are both torch.ops.{NAMESPACE}.{signature.op}; give one another op name and "
                "build its kernel wheel again",
                kernels=(first, signature.kernel),
            )


_KEPT: list[torch.library.Library] = []


def _split(
    signature: KernelSignature, args: tuple[Any, ...], keywords: dict[str, Any]
) -> tuple[tuple[Any, ...], tuple[Any, ...], tuple[Any, ...]]:
    """Return (tensors, static values, scalars) of a call by schema, with defaults filled in."""
    given = [arg.name for arg in signature.args if arg.role != "out"]
    tensors = args + tuple(keywords[name] for name in given[len(args) :])
    axes = tuple(_axis_value(keywords[axis.name]) for axis in signature.given_axes)
    options = tuple(keywords.get(spec.name, spec.default) for spec in signature.options)
    scalars = tuple(keywords.get(spec.name, spec.default) for spec in signature.scalars)
    return tensors, axes + options, scalars


def _axis_value(value: Any) -> Any:
    return str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else value


def _cuda_implementation(signature: KernelSignature) -> Implementation:
    op = kernel_op(signature.kernel)

    def implementation(*args: Any, **keywords: Any) -> Any:
        return op.launch(*_split(signature, args, keywords))

    return implementation


def _cpu_implementation(signature: KernelSignature) -> Implementation:
    def implementation(*_args: Any, **_keywords: Any) -> Any:
        raise ArgumentError(
            f"torch.ops.{NAMESPACE}.{signature.op}: the tensors are on the CPU, expected CUDA tensors; "
            "tkbuild.reference has plain torch versions",
            kernel=signature.kernel,
        )

    return implementation


def _fake_implementation(signature: KernelSignature) -> Implementation:
    """Shapes, dtypes and strides of the outputs, without a device; sizes may be symbolic."""

    def implementation(*args: Any, **keywords: Any) -> Any:
        tensors, static, scalars = _split(signature, args, keywords)
        values = bind(signature, tensors, static, scalars)
        axes = call_axes(signature, tensors, static)
        check_traced(signature, tensors, values, axes)
        device = next(tensor.device for tensor in tensors if tensor is not None)
        # Not by way of the allocation's storage: comparing symbolic sizes would add guards to the traced graph.
        wanted = allocations(signature, {**values, **axes})
        outs = tuple(torch.empty_strided(out.size, out.stride, dtype=out.dtype, device=device) for out in wanted)
        return outs[0] if len(outs) == 1 else outs or None

    return implementation

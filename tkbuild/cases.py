"""Turn a case's values into tensors in guarded storage, for `verify` and `bench`."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch

from tkbuild.checks import CaseValue
from tkbuild.errors import ArgumentError, VerifyError
from tkbuild.fills import Draw, fill
from tkbuild.launchplan import default_strides, strides
from tkbuild.signature import AxisValue, KernelSignature

#: Bytes of poison before and behind every tensor; a multiple of every alignment a spec may ask for.
GUARD_BYTES = 512
#: No float format reads this byte repeated as a number near those that kernels produce.
POISON_BYTE = 0xAB
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_CHUNK_BYTES = 2**30
_INTEGER_FILL, _FLOAT_FILL = "randint(0, 8)", "normal"


@dataclass(frozen=True)
class GuardedTensor:
    """A tensor inside storage of its own, poisoned around it and in the gaps between its rows."""

    view: torch.Tensor
    storage: torch.Tensor

    @classmethod
    def poisoned(
        cls, size: Sequence[int], stride: Sequence[int], elems: int, dtype: torch.dtype, device: torch.device
    ) -> GuardedTensor:
        """A tensor of ``size`` and ``stride`` in the middle of ``elems`` elements, with guard zones at both ends."""
        item = dtype.itemsize
        storage = torch.full((2 * GUARD_BYTES + elems * item,), POISON_BYTE, dtype=torch.uint8, device=device)
        middle = storage[GUARD_BYTES : GUARD_BYTES + elems * item].view(dtype)
        return cls(middle.as_strided(tuple(size), tuple(stride), middle.storage_offset()), storage)

    def stray_writes(self) -> int:
        """Return how many bytes outside the tensor's elements differ from the poison; overwrites the tensor."""
        # As integers: torch would write a bool as 0 or 1.
        view = self.view.view(_INTEGERS[self.view.element_size()])
        poison = torch.full((view.element_size(),), POISON_BYTE, dtype=torch.uint8, device=view.device)
        if view.numel():
            view.copy_(poison.view(view.dtype).expand(view.shape))
        return sum(int(torch.count_nonzero(part != POISON_BYTE)) for part in self.storage.split(_CHUNK_BYTES))


@dataclass(frozen=True)
class Call:
    """One call of a kernel: its values, its inputs and its poisoned outputs, all in the spec's order."""

    signature: KernelSignature
    values: Mapping[str, CaseValue]
    inputs: tuple[GuardedTensor | None, ...]
    outputs: tuple[GuardedTensor, ...]

    @property
    def static(self) -> tuple[CaseValue, ...]:
        """The values of the axes that a call names, and of the options."""
        return tuple(self.values[name] for name in self.signature.static_names)

    @property
    def scalars(self) -> tuple[CaseValue, ...]:
        return tuple(self.values[spec.name] for spec in self.signature.scalars)

    @property
    def option_values(self) -> tuple[CaseValue, ...]:
        return tuple(self.values[spec.name] for spec in self.signature.options)

    def keywords(self) -> dict[str, CaseValue]:
        """What the reference takes by keyword: axes that a call names, scalars and options."""
        names = [*self.signature.static_names, *(scalar.name for scalar in self.signature.scalars)]
        return {name: self.values[name] for name in names}

    def tensor_bytes(self) -> dict[str, int]:
        """The size of every tensor by name, in bytes of its elements."""
        names = [arg.name for arg in self.signature.args]
        return {name: 0 if t is None else t.view.nbytes for name, t in zip(names, self.tensors, strict=True)}

    @property
    def tensors(self) -> tuple[GuardedTensor | None, ...]:
        """Inputs and outputs in the spec's order; None for an optional argument that is left out."""
        return (*self.inputs, *self.outputs)

    @property
    def views(self) -> tuple[torch.Tensor | None, ...]:
        return tuple(None if tensor is None else tensor.view for tensor in self.tensors)

    @property
    def input_views(self) -> tuple[torch.Tensor | None, ...]:
        return self.views[: len(self.inputs)]


def complete_values(
    signature: KernelSignature, given: Mapping[str, CaseValue], axes: Mapping[str, AxisValue]
) -> dict[str, CaseValue]:
    """Return ``given`` with the variant's axes, defaults of scalars and options, and contiguous strides filled in.

    Raises: ArgumentError naming what has neither a value nor a default.
    """
    values: dict[str, Any] = {
        **axes,
        **{s.name: s.default for s in signature.values if s.default is not None},
        **given,
    }
    for arg in signature.args:
        if arg.strides is None:
            continue
        for expr, fallback in zip(arg.strides, arg.alloc.strides if arg.alloc else default_strides(arg), strict=True):
            if expr.is_name and str(expr) not in values:
                values[str(expr)] = fallback.evaluate(values)
    names = {dim.name for dim in signature.bound_dims} | {s.name for s in signature.values}
    if missing := sorted(names - values.keys()):
        raise ArgumentError(
            f"{signature.kernel}: a case gives no value for {', '.join(missing)}", kernel=signature.kernel, missing=missing
        )
    return values


def make_call(
    signature: KernelSignature, values: Mapping[str, CaseValue], fills: Mapping[str, Any], generator: torch.Generator
) -> Call:
    """Return a call with freshly drawn inputs and poisoned outputs on the generator's device."""
    inputs: list[GuardedTensor | None] = []
    outputs: list[GuardedTensor] = []
    drawn: dict[str, torch.Tensor] = {}
    axes = {axis.name: cast("AxisValue", values[axis.name]) for axis in signature.axes}
    for arg in signature.args:
        size = tuple(int(expr.evaluate(values)) for expr in arg.shape)
        stride = tuple(int(expr.evaluate(values)) for expr in strides(arg))
        elems = int(arg.alloc.elems.evaluate(values)) if arg.alloc else 0
        elems = max(elems, _span(size, stride))
        dtype = getattr(torch, arg.dtype.resolve(axes))
        tensor = GuardedTensor.poisoned(size, stride, elems, dtype, generator.device)
        if arg.role == "out":
            outputs.append(tensor)
            continue
        if arg.role != "workspace":
            text = str(fills.get(arg.name, _FLOAT_FILL if dtype.is_floating_point else _INTEGER_FILL))
            filled = fill(text, Draw(size, dtype, generator), values, drawn)
            if filled is None:
                inputs.append(None)
                continue
            drawn[arg.name] = tensor.view.copy_(filled)
        inputs.append(tensor)
    return Call(signature, values, tuple(inputs), tuple(outputs))


def _span(size: Sequence[int], stride: Sequence[int]) -> int:
    if 0 in size:
        return 0
    return 1 + sum((extent - 1) * step for extent, step in zip(size, stride, strict=True))


def reference_function(name: str) -> Callable[..., Any]:
    """Return the reference: ``family.function`` of `tkbuild.reference`, or ``module:function`` of a module on the path.

    Raises: VerifyError when there is none.
    """
    module, _, function = name.partition(":") if ":" in name else f"tkbuild.reference.{name}".rpartition(".")
    try:
        found = getattr(importlib.import_module(module), function, None)
    except ModuleNotFoundError as exc:
        raise VerifyError(f"no reference {name!r}: the module {module} is not on the path (PYTHONPATH)", reference=name) from exc
    if not callable(found):
        raise VerifyError(f"no reference {name!r}: {module} has no function {function}", reference=name)
    return found  # type: ignore[no-any-return]

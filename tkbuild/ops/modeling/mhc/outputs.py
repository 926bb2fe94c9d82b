"""Buffers that callers give for results of differentiable layers."""

from __future__ import annotations

import torch
from torch.compiler import is_compiling

from tkbuild.errors import ArgumentError

__all__ = ["can_be_written"]


def can_be_written(kernel: str, out: torch.Tensor, *inputs: torch.Tensor) -> bool:
    """Whether a kernel may write its result into ``out``, so that autograd knows; else the result is copied there.

    A view is no such buffer: what is written into one concerns its base, which autograd works out for an operator's first input only.
    Raises: ArgumentError where ``out`` shares memory with an input, whose value the backward pass needs.
    """
    if is_compiling():
        return False
    differentiated = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in inputs)
    if differentiated and any(_overlap(out, tensor) for tensor in inputs):
        raise ArgumentError(
            f"{kernel}: out shares memory with an input that the backward pass needs, expected a buffer of its own",
            kernel=kernel,
            argument="out",
        )
    return not (differentiated and out._is_view())  # its name is in torch's own messages


def _overlap(a: torch.Tensor, b: torch.Tensor) -> bool:
    (first, end), (other, other_end) = _addresses(a), _addresses(b)
    return first < other_end and other < end


def _addresses(tensor: torch.Tensor) -> tuple[int, int]:
    """The first byte of ``tensor`` and the one behind its last."""
    if not tensor.numel():
        return 0, 0
    last = sum((extent - 1) * stride for extent, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()

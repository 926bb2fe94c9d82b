"""The Sinkhorn normalisation, differentiable."""

from __future__ import annotations

from typing import Any

import torch

from tkbuild.runtime.op import kernel_op

__all__ = ["sinkhorn_normalize"]

_sinkhorn = kernel_op("mhc.sinkhorn")
_sinkhorn_bwd = kernel_op("mhc.sinkhorn_bwd")


class SinkhornNormalize(torch.autograd.Function):
    """Saves the input only: the backward kernel recomputes every round."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, repeat: int, eps: float) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.repeat, ctx.eps = repeat, eps
        result: torch.Tensor = _sinkhorn((x,), (), (repeat, eps))
        return result

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (x,) = ctx.saved_tensors
        return _sinkhorn_bwd((grad_output.contiguous(), x), (), (ctx.repeat, ctx.eps)), None, None


def sinkhorn_normalize(x: torch.Tensor, repeat: int = 10, eps: float = 1e-6) -> torch.Tensor:
    """Return x made doubly stochastic: softmax of each row, then ``repeat`` rounds of dividing by column and row sums.

    Differentiable once with respect to ``x``.
    Shapes: x (..., m, m), m = 4 -> the same.  Dtypes: float32.
    Raises: ArgumentError, NoVariantError, LaunchError.
    """
    matrices = x.reshape(-1, *x.shape[-2:]).contiguous()
    result: torch.Tensor = SinkhornNormalize.apply(matrices, repeat, eps)  # type: ignore[no-untyped-call]
    return result.view(x.shape)

"""A layer's input from the residual streams, differentiable."""

from __future__ import annotations

from typing import Any

import torch

from tkbuild.ops.mhc.shapes import STREAMS, rows, streams, tokens
from tkbuild.ops.modeling.mhc.gradient_sharing import Edge, gradient_edge, published_grad
from tkbuild.ops.modeling.mhc.outputs import can_be_written
from tkbuild.runtime.op import kernel_op

__all__ = ["mhc_pre_apply_mix"]

_apply = kernel_op("mhc.pre_apply_mix")
_apply_bwd = kernel_op("mhc.pre_apply_mix_bwd")


class PreApplyMix(torch.autograd.Function):
    """Saves the inputs; adds to the residual's gradient that ``mhc_post`` left, if there is one."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, mix: torch.Tensor, out: torch.Tensor | None, edge: Edge) -> torch.Tensor:
        ctx.save_for_backward(x, mix)
        ctx.edge = edge
        result: torch.Tensor = _apply((x, mix), (), (), None if out is None else (rows("mhc.pre_apply_mix", "out", out),))
        if out is None:
            return result
        ctx.mark_dirty(out)
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None, None, None]:
        x, mix = ctx.saved_tensors
        needs_x, needs_mix = ctx.needs_input_grad[:2]
        shared = published_grad(x, ctx.edge) if needs_x else None
        fresh = torch.empty_like(x) if needs_x and shared is None else None
        x_grad = fresh if shared is None else shared.view(x.shape)
        given = (rows("mhc.pre_apply_mix_bwd", "the gradient", grad.contiguous()), x, mix, x_grad)
        mix_grad = _apply_bwd(given, (), (int(shared is not None),))
        return fresh, mix_grad if needs_mix else None, None, None


def mhc_pre_apply_mix(x: torch.Tensor, mix: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """Return a layer's input, the sum of mix[i] * x[i] over the streams of the residual ``x``, in ``out`` if that is given.

    Differentiable once with respect to ``x`` and ``mix``. Where the backward pass has reached an ``mhc_post`` of the same residual, the
    gradient of x is added to that one in place, as if both had been returned.
    Shapes: x (..., m, H), mix (..., m, 1), m = 4, H a multiple of 8 -> (..., H).  Dtypes: x and result bfloat16, mix float32.
    Layout: any, but ``out`` contiguous and apart from the other tensors; what is not contiguous is copied.
    Raises: ArgumentError, NoVariantError, LaunchError.
    """
    residual = streams("mhc.pre_apply_mix", "x", x.contiguous())
    factors = tokens("mhc.pre_apply_mix", "mix", mix.contiguous(), (STREAMS, 1), (STREAMS,))
    edge = gradient_edge(x)
    if out is not None and can_be_written("mhc.pre_apply_mix", out, x, mix):
        result: torch.Tensor = PreApplyMix.apply(residual, factors, out, edge)  # type: ignore[no-untyped-call]
        return result
    fresh: torch.Tensor = PreApplyMix.apply(residual, factors, None, edge)  # type: ignore[no-untyped-call]
    fresh = fresh.view(*x.shape[:-2], x.shape[-1])
    return fresh if out is None else out.copy_(fresh)

"""The residual streams behind a layer, differentiable."""

from __future__ import annotations

from typing import Any

import torch
from torch.compiler import is_compiling

from tkbuild.ops.mhc.shapes import STREAMS, rows, streams, tokens
from tkbuild.ops.modeling.mhc.gradient_sharing import publish_grad
from tkbuild.runtime.op import kernel_op

__all__ = ["mhc_post"]

_post = kernel_op("mhc.post")
_post_bwd = kernel_op("mhc.post_bwd")


class _Post(torch.autograd.Function):
    """Saves the inputs, and leaves the residual's gradient where the layer's first part finds it."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, residual: torch.Tensor, post: torch.Tensor, comb: torch.Tensor, out: torch.Tensor | None
    ) -> torch.Tensor:
        ctx.save_for_backward(x, residual, post, comb)
        result: torch.Tensor = _post((x, residual, post, comb), (), (), None if out is None else (streams("mhc.post", "out", out),))
        if out is None:
            return result
        ctx.mark_dirty(out)
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        residual = ctx.saved_tensors[1]
        grads = _post_bwd((*ctx.saved_tensors, streams("mhc.post_bwd", "the gradient", grad.contiguous())))
        if ctx.needs_input_grad[1]:
            publish_grad(residual, grads[1])
        return *(one if needed else None for one, needed in zip(grads, ctx.needs_input_grad, strict=False)), None


def mhc_post(
    x: torch.Tensor,
    residual: torch.Tensor,
    post_layer_mix: torch.Tensor,
    comb_res_mix: torch.Tensor,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the new residual: post_layer_mix[o] * x + the sum of comb_res_mix[i, o] * residual[i], in ``out`` if that is given.

    Differentiable once with respect to the first four tensors. The backward pass leaves the residual's gradient on the residual's
    storage as ``grad_from_mhc_post``: layers before this one that read the same residual add to it instead of returning their own.
    Shapes: x (..., H), residual and out (..., m, H), post_layer_mix (..., m, 1), comb_res_mix (..., m, m), m = 4, H a multiple of 8.
    Dtypes: x, residual, out bfloat16, mixes float32.  Layout: any, but ``out`` contiguous; what is not contiguous is copied.
    Raises: ArgumentError, NoVariantError, LaunchError.
    """
    given = (
        rows("mhc.post", "x", x.contiguous()),
        streams("mhc.post", "residual", residual.contiguous()),
        tokens("mhc.post", "post_layer_mix", post_layer_mix.contiguous(), (STREAMS, 1), (STREAMS,)),
        tokens("mhc.post", "comb_res_mix", comb_res_mix.contiguous(), (STREAMS, STREAMS)).view(-1, STREAMS, STREAMS),
    )
    if out is not None and not is_compiling():
        result: torch.Tensor = _Post.apply(*given, out)  # type: ignore[no-untyped-call]
        return result
    fresh: torch.Tensor = _Post.apply(*given, None)  # type: ignore[no-untyped-call]
    fresh = fresh.view(residual.shape)
    return fresh if out is None else out.copy_(fresh)

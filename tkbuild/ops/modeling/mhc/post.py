"""The residual streams behind a layer, differentiable."""

from __future__ import annotations

from typing import Any

import torch

from tkbuild.ops.mhc.post import folded_inputs
from tkbuild.ops.mhc.shapes import streams
from tkbuild.ops.modeling.mhc.gradient_sharing import Edge, gradient_edge, publish_grad
from tkbuild.ops.modeling.mhc.outputs import can_be_written
from tkbuild.runtime.op import kernel_op

__all__ = ["mhc_post"]

_post = kernel_op("mhc.post")
_post_bwd = kernel_op("mhc.post_bwd")


class Post(torch.autograd.Function):
    """Saves the inputs, and leaves the residual's gradient where the layer's first part finds it."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        residual: torch.Tensor,
        post: torch.Tensor,
        comb: torch.Tensor,
        out: torch.Tensor | None,
        edge: Edge,
    ) -> torch.Tensor:
        ctx.save_for_backward(x, residual, post, comb)
        ctx.edge = edge
        result: torch.Tensor = _post((x, residual, post, comb), (), (), None if out is None else (streams("mhc.post", "out", out),))
        if out is None:
            return result
        ctx.mark_dirty(out)
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        saved = ctx.saved_tensors
        grads = _post_bwd((*saved, streams("mhc.post_bwd", "the gradient", grad.contiguous())))
        if ctx.needs_input_grad[1] and ctx.edge is not None:
            publish_grad(saved[1], grads[1], ctx.edge)
        return *(one if needed else None for one, needed in zip(grads, ctx.needs_input_grad, strict=False)), None, None


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
    Dtypes: x, residual, out bfloat16, mixes float32.  Layout: any, but ``out`` contiguous and apart from the other tensors; what is not
    contiguous is copied.
    Raises: ArgumentError, NoVariantError, LaunchError.
    """
    mixes = (post_layer_mix.contiguous(), comb_res_mix.contiguous())
    given = folded_inputs("mhc.post", x.contiguous(), residual, *mixes)
    edge = gradient_edge(residual)
    if out is not None and can_be_written("mhc.post", out, x, residual, post_layer_mix, comb_res_mix):
        result: torch.Tensor = Post.apply(*given, out, edge)  # type: ignore[no-untyped-call]
        return result
    fresh: torch.Tensor = Post.apply(*given, None, edge)  # type: ignore[no-untyped-call]
    fresh = fresh.view(residual.shape)
    return fresh if out is None else out.copy_(fresh)

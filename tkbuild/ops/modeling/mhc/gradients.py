"""Gradients of ``torch.ops.tkbuild``, from the backward functions of the layers.

Torch takes a gradient only of an op that writes into none of its arguments: the other ops that have a backward kernel are differentiable
through their layers.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import torch

from tkbuild.ops.modeling.mhc.apply_mix import PreApplyMix
from tkbuild.ops.modeling.mhc.expand import ExpandToMhc
from tkbuild.ops.modeling.mhc.mixes import HeadComputeMix, PreSplitMixes
from tkbuild.ops.modeling.mhc.norm_fn import MergeNormWeight
from tkbuild.ops.modeling.mhc.post import Post
from tkbuild.ops.modeling.mhc.sinkhorn import SinkhornNormalize

__all__ = ["register_autograd"]


@dataclass(frozen=True)
class _Gradient:
    """The backward function of a layer whose ``forward`` begins with the tensors of an op, and saves these and one output, if any."""

    backward_of_layer: Callable[..., tuple[torch.Tensor | None, ...]]
    saved_output: int | None = None

    def save(self, ctx: Any, inputs: tuple[Any, ...], output: Any, keyword_only_inputs: dict[str, Any] | None = None) -> None:
        ctx.save_for_backward(*inputs, *(() if self.saved_output is None else (output[self.saved_output],)))
        ctx.count, ctx.edge = len(inputs), None
        for name, value in (keyword_only_inputs or {}).items():
            setattr(ctx, name, value)

    def backward(self, ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        found = self.backward_of_layer(ctx, *grads)
        found = found[: ctx.count] if isinstance(found, tuple) else (found,)
        return tuple(grad if grad is None else grad.view_as(of) for grad, of in zip(found, ctx.saved_tensors, strict=False))


_GRADIENTS = {
    "mhc_expand_to_mhc": _Gradient(ExpandToMhc.backward),
    "mhc_fn_normw_merge": _Gradient(MergeNormWeight.backward),
    "mhc_head_compute_mix": _Gradient(HeadComputeMix.backward),
    "mhc_post": _Gradient(Post.backward),
    "mhc_pre_apply_mix": _Gradient(PreApplyMix.backward),
    "mhc_pre_split_mixes": _Gradient(PreSplitMixes.backward, saved_output=1),
    "mhc_sinkhorn": _Gradient(SinkhornNormalize.backward),
}


def register_autograd(registered: Collection[str]) -> None:
    """Give those of the ops ``registered`` that have a gradient theirs."""
    for op, gradient in _GRADIENTS.items():
        if op in registered:
            torch.library.register_autograd(f"tkbuild::{op}", gradient.backward, setup_context=gradient.save)

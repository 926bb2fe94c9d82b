"""The parts of hyper-connections, under the names of release 1.0."""

from __future__ import annotations

import torch

from tkbuild.ops import mhc
from tkbuild.ops.mhc import mhc_post_fwd
from tkbuild.ops.modeling.mhc import (
    expand_to_mhc,
    mhc_head_compute_mix,
    mhc_multilayer_recompute,
    mhc_post,
    mhc_pre_apply_mix,
    mhc_pre_big_fuse,
    mhc_pre_norm_fn,
    mhc_pre_split_mixes,
    sinkhorn_normalize,
)

__all__ = [
    "expand_to_mhc",
    "mhc_head_compute_mix",
    "mhc_multilayer_recompute",
    "mhc_post",
    "mhc_post_bwd",
    "mhc_post_fwd",
    "mhc_pre_apply_mix",
    "mhc_pre_big_fuse",
    "mhc_pre_norm_fn",
    "mhc_pre_split_mixes",
    "sinkhorn_normalize",
]


def mhc_post_bwd(
    x: torch.Tensor,
    residual: torch.Tensor,
    post_layer_mix: torch.Tensor,
    comb_res_mix: torch.Tensor,
    d_o: torch.Tensor,
    fuse_grad_acc: bool = True,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return what ``tkbuild.ops.mhc.mhc_post_bwd`` returns; fuse_grad_acc decides nothing, since the residual has its whole gradient from autograd."""
    return mhc.mhc_post_bwd(x, residual, post_layer_mix, comb_res_mix, d_o)

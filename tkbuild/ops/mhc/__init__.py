"""Manifold hyper-connections: the kernels under their 2.1 names, which write into outputs that the caller gives."""

from tkbuild.ops.mhc.apply_mix import mhc_pre_apply_mix_bwd, mhc_pre_apply_mix_fwd
from tkbuild.ops.mhc.big_fuse import mhc_pre_big_fuse_fwd
from tkbuild.ops.mhc.expand import expand_to_mhc_bwd, expand_to_mhc_fwd
from tkbuild.ops.mhc.mixes import (
    mhc_head_compute_mix_bwd,
    mhc_head_compute_mix_fwd,
    mhc_pre_split_mixes_bwd,
    mhc_pre_split_mixes_fwd,
)
from tkbuild.ops.mhc.norm_fn import (
    mhc_pre_norm_fn_mul_bwd,
    mhc_pre_norm_fn_mul_fwd,
    mhc_reduce_partials_and_rmsnorm_bwd,
    mhc_reduce_partials_and_rmsnorm_fwd,
)
from tkbuild.ops.mhc.post import mhc_post_bwd, mhc_post_fwd
from tkbuild.ops.mhc.recompute import mhc_multilayer_recompute
from tkbuild.ops.mhc.sinkhorn import mhc_sinkhorn_bwd, mhc_sinkhorn_fwd
from tkbuild.ops.mhc.weights import mhc_fn_normw_merge_bwd, mhc_fn_normw_merge_fwd

__all__ = [
    "expand_to_mhc_bwd",
    "expand_to_mhc_fwd",
    "mhc_fn_normw_merge_bwd",
    "mhc_fn_normw_merge_fwd",
    "mhc_head_compute_mix_bwd",
    "mhc_head_compute_mix_fwd",
    "mhc_multilayer_recompute",
    "mhc_post_bwd",
    "mhc_post_fwd",
    "mhc_pre_apply_mix_bwd",
    "mhc_pre_apply_mix_fwd",
    "mhc_pre_big_fuse_fwd",
    "mhc_pre_norm_fn_mul_bwd",
    "mhc_pre_norm_fn_mul_fwd",
    "mhc_pre_split_mixes_bwd",
    "mhc_pre_split_mixes_fwd",
    "mhc_reduce_partials_and_rmsnorm_bwd",
    "mhc_reduce_partials_and_rmsnorm_fwd",
    "mhc_sinkhorn_bwd",
    "mhc_sinkhorn_fwd",
]

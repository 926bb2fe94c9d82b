"""References of the manifold hyper-connection kernels."""

from tkbuild.reference.mhc.apply_mix import pre_apply_mix, pre_apply_mix_bwd
from tkbuild.reference.mhc.big_fuse import pre_big_fuse
from tkbuild.reference.mhc.expand import expand_to_mhc, expand_to_mhc_bwd
from tkbuild.reference.mhc.mixes import head_compute_mix, head_compute_mix_bwd, pre_split_mixes, pre_split_mixes_bwd
from tkbuild.reference.mhc.norm_fn import (
    pre_norm_fn_mul,
    pre_norm_fn_mul_bwd,
    reduce_partials_and_rmsnorm,
    reduce_partials_and_rmsnorm_bwd,
)
from tkbuild.reference.mhc.post import post, post_bwd
from tkbuild.reference.mhc.recompute import multilayer_recompute
from tkbuild.reference.mhc.sinkhorn import sinkhorn, sinkhorn_bwd
from tkbuild.reference.mhc.weights import fn_normw_merge, fn_normw_merge_bwd

__all__ = [
    "expand_to_mhc",
    "expand_to_mhc_bwd",
    "fn_normw_merge",
    "fn_normw_merge_bwd",
    "head_compute_mix",
    "head_compute_mix_bwd",
    "multilayer_recompute",
    "post",
    "post_bwd",
    "pre_apply_mix",
    "pre_apply_mix_bwd",
    "pre_big_fuse",
    "pre_norm_fn_mul",
    "pre_norm_fn_mul_bwd",
    "pre_split_mixes",
    "pre_split_mixes_bwd",
    "reduce_partials_and_rmsnorm",
    "reduce_partials_and_rmsnorm_bwd",
    "sinkhorn",
    "sinkhorn_bwd",
]

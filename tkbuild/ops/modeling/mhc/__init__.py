"""Differentiable manifold hyper-connection operators."""

from tkbuild.ops.mhc.recompute import mhc_multilayer_recompute
from tkbuild.ops.modeling.mhc.apply_mix import mhc_pre_apply_mix
from tkbuild.ops.modeling.mhc.big_fuse import mhc_pre_big_fuse
from tkbuild.ops.modeling.mhc.expand import expand_from_embedding, expand_to_mhc
from tkbuild.ops.modeling.mhc.functional import mhc_head, mhc_pre
from tkbuild.ops.modeling.mhc.mixes import mhc_head_compute_mix, mhc_pre_split_mixes
from tkbuild.ops.modeling.mhc.norm_fn import mhc_pre_norm_fn
from tkbuild.ops.modeling.mhc.post import mhc_post
from tkbuild.ops.modeling.mhc.sinkhorn import sinkhorn_normalize

__all__ = [
    "expand_from_embedding",
    "expand_to_mhc",
    "mhc_head",
    "mhc_head_compute_mix",
    "mhc_multilayer_recompute",
    "mhc_post",
    "mhc_pre",
    "mhc_pre_apply_mix",
    "mhc_pre_big_fuse",
    "mhc_pre_norm_fn",
    "mhc_pre_split_mixes",
    "sinkhorn_normalize",
]

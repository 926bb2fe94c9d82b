"""Mixture of experts, contract of release 1.0: as ``tkbuild.ops.moe``, but for the order of the sum in ``normalize_weight``."""

from tkbuild.ops.moe import (
    aux_fi,
    expand_to_fused,
    expand_to_fused_with_sf,
    get_fused_mapping,
    group_count,
    inplace_unique_group_indices,
    mask_indices_by_tp,
    reduce_fused,
    top2_sum_gate,
    topk_gate,
    topk_sum_and_topk_group_idx,
)
from tkbuild.ops.v1.moe.weights import normalize_weight

__all__ = [
    "aux_fi",
    "expand_to_fused",
    "expand_to_fused_with_sf",
    "get_fused_mapping",
    "group_count",
    "inplace_unique_group_indices",
    "mask_indices_by_tp",
    "normalize_weight",
    "reduce_fused",
    "top2_sum_gate",
    "topk_gate",
    "topk_sum_and_topk_group_idx",
]

"""References of the mixture-of-experts kernels."""

from tkbuild.reference.moe.expand import expand_to_fused, reduce_fused
from tkbuild.reference.moe.gates import (
    moe_topk_gate_backward,
    moe_topk_gate_forward,
    top2_sum_gate,
    topk_gate,
    topk_sum_and_topk_group_idx,
)
from tkbuild.reference.moe.routing import (
    aux_fi,
    get_fused_mapping,
    group_count,
    inplace_unique_group_indices,
    mask_indices_by_tp,
)
from tkbuild.reference.moe.weights import normalize_weight

__all__ = [
    "aux_fi",
    "expand_to_fused",
    "get_fused_mapping",
    "group_count",
    "inplace_unique_group_indices",
    "mask_indices_by_tp",
    "moe_topk_gate_backward",
    "moe_topk_gate_forward",
    "normalize_weight",
    "reduce_fused",
    "top2_sum_gate",
    "topk_gate",
    "topk_sum_and_topk_group_idx",
]

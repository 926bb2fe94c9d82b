"""Mixture of experts: gating, routing, expand and reduce."""

from tkbuild.ops.moe.expand import expand_to_fused, expand_to_fused_with_sf, reduce_fused
from tkbuild.ops.moe.gates import moe_topk_gate, moe_topk_gate_backward, moe_topk_gate_forward, topk_gate
from tkbuild.ops.moe.grouped_gates import top2_sum_gate, topk_sum_and_topk_group_idx
from tkbuild.ops.moe.routing import (
    aux_fi,
    get_fused_mapping,
    group_count,
    inplace_unique_group_indices,
    mask_indices_by_tp,
)
from tkbuild.ops.moe.weights import normalize_weight

__all__ = [
    "aux_fi",
    "expand_to_fused",
    "expand_to_fused_with_sf",
    "get_fused_mapping",
    "group_count",
    "inplace_unique_group_indices",
    "mask_indices_by_tp",
    "moe_topk_gate",
    "moe_topk_gate_backward",
    "moe_topk_gate_forward",
    "normalize_weight",
    "reduce_fused",
    "top2_sum_gate",
    "topk_gate",
    "topk_sum_and_topk_group_idx",
]

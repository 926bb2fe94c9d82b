"""Gates that choose among groups of experts, contract of release 1.0."""

from __future__ import annotations

import torch

from tkbuild.errors import ArgumentError
from tkbuild.ops.moe.gates import check_pairs, flat, shared_slots
from tkbuild.runtime.op import kernel_op

_group_idx = kernel_op("moe.topk_sum_and_topk_group_idx")
_top2_sum_gate = kernel_op("moe.top2_sum_gate")
_SCORINGS = {"sigmoid": 0, "sqrtsoftplus": 1, "softmax": 2}


def topk_sum_and_topk_group_idx(scores: torch.Tensor, num_topk_sum: int, num_topk_groups: int) -> torch.Tensor:
    """Return the indices of the ``num_topk_groups`` groups with the largest sums of their ``num_topk_sum`` largest scores.

    In descending order of the sums; ties go to the smaller index. NaN ranks below every number, among the scores of a group as
    among sums, and a sum with a NaN is NaN: so indices are unique and in [0, G) whatever the scores.
    Shapes: scores (T, G, E / G), G <= 32, num_topk_sum 1 or 2 and at most E / G, num_topk_groups <= G -> (T, num_topk_groups);
    T may be 0.  Dtypes: float32 -> int64.  Layout: a row contiguous, rows any stride.
    Raises: ArgumentError, NoVariantError, LaunchError.
    """
    result: torch.Tensor = _group_idx((scores,), (), (num_topk_sum, num_topk_groups))
    return result


def top2_sum_gate(
    logits: torch.Tensor,
    bias: torch.Tensor,
    num_topk: int,
    num_topk_groups: int,
    num_groups: int,
    use_shared_as_routed: bool,
    num_shared_experts: int,
    routed_scaling_factor: float,
    ep_rank: int,
    num_ep_ranks: int,
    tp_rank: int,
    num_tp_ranks: int,
    scoring_func: str,
    mask: torch.Tensor | None = None,
    fix_routing_mask: torch.Tensor | None = None,
    to_physical_map: torch.Tensor | None = None,
    logical_count: torch.Tensor | None = None,
    unmapped_topk_idx: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (topk_idx, topk_weights): the experts of each token, as a rank numbers them, and their weights.

    scoring_func: 'sigmoid', 1 / (1 + exp(-x)); 'sqrtsoftplus', sqrt(x > 20 ? x : log1p(exp(x))); 'softmax'. Experts are ranked by
    score plus bias, with 'softmax' by logit plus bias. If num_topk_groups < num_groups, only experts of the best groups
    remain, by the sums of their two largest ranking values, as in ``topk_sum_and_topk_group_idx``. Of them ``num_topk`` are picked
    in descending order; ties go to the smaller index and NaN ranks below every number. The weight of a pick is its score, without
    the bias, over 1e-20 plus the scores of the picks in turn, times ``routed_scaling_factor``; non-finite scores among the picks
    make NaN. With ``use_shared_as_routed`` the slots behind the picks hold the S = ``num_shared_experts`` shared experts
    R, R + 1, each of weight 1.

    mask: T flags; tokens where it is False have -1 and weight 0 in all slots.
    fix_routing_mask, to_physical_map, logical_count, unmapped_topk_idx: as in ``moe_topk_gate_forward``.
    num_ep_ranks, tp_rank, num_tp_ranks: each expert-parallel rank has per = (R + D - 1) // num_ep_ranks physical experts (R //
    num_ep_ranks without a map), and num_tp_ranks neighbouring ranks work on the same tokens. Experts of other ranks than the
    tp_rank-th of each such group become -1 and keep their weights; the others are numbered without gaps.

    Shapes: logits (T, R), R <= 1024 a multiple of 4; bias (R); fix_routing_mask (T); to_physical_map (R + S, D); logical_count
    (R + S); unmapped_topk_idx (T, num_topk) -> (T, num_topk + S), num_topk + S <= 32; T may be 0. Groups are equally large; if they
    are chosen from, there are up to 32, of 2 to 32 experts, and those kept have num_topk experts.
    Dtypes: float32; masks bool; maps and counts int32; indices int64.
    Layout: contiguous, at addresses of 16 bytes; rows of logits may lie apart by a multiple of 4, those of unmapped_topk_idx by
    any number from num_topk on.
    Raises: ArgumentError, NoVariantError, LaunchError.
    """
    name = "moe.top2_sum_gate"
    if scoring_func not in _SCORINGS:
        raise ArgumentError(f"{name}: scoring_func is {scoring_func!r}, expected one of {', '.join(_SCORINGS)}")
    check_pairs(name, to_physical_map, logical_count, fix_routing_mask, unmapped_topk_idx)
    num_shared = shared_slots(name, use_shared_as_routed, num_shared_experts)
    if logits.dim() == 2:
        _check_groups(name, logits.shape[1], num_groups, num_topk_groups)
        _check_shared(name, logits.shape[1], num_topk, num_shared, to_physical_map)
    tensors = (logits, bias, flat(mask), flat(fix_routing_mask), to_physical_map, logical_count, unmapped_topk_idx)
    ranks = (ep_rank, num_ep_ranks, tp_rank, num_tp_ranks)
    scalars = (num_topk, num_topk_groups, num_groups, num_shared, float(routed_scaling_factor), *ranks, _SCORINGS[scoring_func])
    result: tuple[torch.Tensor, torch.Tensor] = _top2_sum_gate(tensors, (), scalars)
    return result


def _check_groups(name: str, num_routed: int, num_groups: int, num_topk_groups: int) -> None:
    if (num_groups == 0) != (num_topk_groups == 0) or not 0 <= num_topk_groups <= num_groups:
        raise ArgumentError(
            f"{name}: {num_topk_groups} of {num_groups} groups are kept, expected both numbers 0, or at least 1 and at most all groups"
        )
    if num_groups and num_routed % num_groups:
        raise ArgumentError(f"{name}: {num_routed} experts in {num_groups} groups, expected equally large groups")


def _check_shared(name: str, num_routed: int, num_topk: int, num_shared: int, to_physical_map: torch.Tensor | None) -> None:
    if num_shared == 0:
        return
    if num_topk % num_shared or num_topk < num_shared or num_routed % (num_topk // num_shared):
        raise ArgumentError(
            f"{name}: {num_topk} of {num_routed} experts with {num_shared} shared ones, expected num_topk to be a multiple of the "
            "shared experts, and the routed ones a multiple of the quotient"
        )
    if to_physical_map is None or to_physical_map.shape[1] <= num_shared:
        columns = "no to_physical_map" if to_physical_map is None else f"a to_physical_map of {to_physical_map.shape[1]} columns"
        raise ArgumentError(f"{name}: {columns}, expected at least {num_shared + 1} columns with {num_shared} shared experts")

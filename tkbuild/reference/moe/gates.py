"""References of the gates."""

from __future__ import annotations

import torch

from tkbuild.reference.moe import gate_rules as rules


def topk_gate(scores: torch.Tensor, *, num_topk: int) -> torch.Tensor:
    """Return the indices of the ``num_topk`` largest scores of each row, largest first.

    Shapes: scores (T, E), any strides; result (T, num_topk), int64; 1 <= num_topk <= E.  Dtypes: scores float32.
    Equal scores are taken in the order of their index, and -0.0 equals 0.0. NaN ranks below every number, minus
    infinity included, and all NaN are equal. So the indices of a row are distinct and in [0, E) for any input.
    """
    is_nan = torch.isnan(scores)
    by_score = torch.sort(scores.masked_fill(is_nan, -torch.inf), dim=-1, descending=True, stable=True).indices
    nan_last = torch.sort(is_nan.gather(-1, by_score).to(torch.int8), dim=-1, stable=True).indices
    return by_score.gather(-1, nan_last)[:, :num_topk].contiguous()


def topk_sum_and_topk_group_idx(scores: torch.Tensor, *, num_topk_sum: int, num_topk_groups: int) -> torch.Tensor:
    """Return the indices of the groups with the largest sums of their ``num_topk_sum`` largest scores, largest first.

    Shapes: scores (T, G, E / G); result (T, num_topk_groups), int64.  Dtypes: scores float32.
    Scores of a group and sums are ordered as scores of `topk_gate`: a sum with a NaN is NaN.
    """
    best = scores.gather(-1, rules.ranked(rules.ranking_keys(scores), num_topk_sum))
    sums = best[..., 0] if num_topk_sum == 1 else best[..., 0] + best[..., 1]
    return rules.ranked(rules.ranking_keys(sums), num_topk_groups).contiguous()


def top2_sum_gate(
    logits: torch.Tensor,
    bias: torch.Tensor,
    mask: torch.Tensor | None = None,
    fix_routing_mask: torch.Tensor | None = None,
    to_physical_map: torch.Tensor | None = None,
    logical_count: torch.Tensor | None = None,
    unmapped_topk_idx: torch.Tensor | None = None,
    *,
    num_topk: int,
    num_topk_groups: int,
    num_groups: int,
    num_shared: int,
    routed_scaling_factor: float,
    ep_rank: int,
    num_ep_ranks: int,
    tp_rank: int,
    num_tp_ranks: int,
    scoring: int,
) -> tuple[torch.Tensor, ...]:
    """Return (unmapped_topk_idx if it is given, topk_idx, topk_weights). See ``tkbuild.ops.moe.top2_sum_gate``."""
    num_routed = logits.shape[1]
    scores = rules.scores_of(logits, scoring)
    ranking = (logits if scoring == rules.SOFTMAX else scores) + bias
    keys = rules.ranking_keys(ranking)
    if num_groups != num_topk_groups:
        keys = keys.masked_fill(~_in_best_groups(ranking, num_groups, num_topk_groups), rules.NO_EXPERT_KEY)
    is_routed = rules.flags_or(mask, True, logits)
    picks, is_fixed = _picks(keys, fix_routing_mask, unmapped_topk_idx, num_topk)
    weights = _weights(scores, picks, _sum_in_order(_scores_at(scores, picks)), routed_scaling_factor)
    experts, weights = rules.with_shared(picks, weights, num_routed, num_shared)
    experts = rules.physical_experts(experts, to_physical_map, logical_count, ep_rank)
    num_physical = num_routed + (0 if to_physical_map is None else to_physical_map.shape[1] - 1)
    experts = _of_tp_rank(experts, num_physical // num_ep_ranks, tp_rank, num_tp_ranks)
    unmapped = _unmapped(unmapped_topk_idx, picks, is_routed, is_fixed)
    return *unmapped, torch.where(is_routed, experts, -1), torch.where(is_routed, weights, 0.0)


def moe_topk_gate_forward(
    logits: torch.Tensor,
    mask: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    image_bias: torch.Tensor | None = None,
    image_token_mask: torch.Tensor | None = None,
    fix_routing_mask: torch.Tensor | None = None,
    to_physical_map: torch.Tensor | None = None,
    logical_count: torch.Tensor | None = None,
    force_random: torch.Tensor | None = None,
    unmapped_topk_idx: torch.Tensor | None = None,
    scores: torch.Tensor | None = None,
    *,
    num_topk: int,
    num_shared: int,
    routed_scaling_factor: float,
    ep_rank: int,
) -> tuple[torch.Tensor, ...]:
    """Return (unmapped_topk_idx and scores if they are given, topk_idx, topk_weights).

    See ``tkbuild.ops.moe.moe_topk_gate_forward``.
    """
    num_routed = logits.shape[1]
    unbiased = rules.scores_of(logits, rules.SQRT_SOFTPLUS)
    offset = torch.zeros_like(logits[:1]) if bias is None else bias
    if image_bias is not None:
        offset = torch.where(rules.flags_or(image_token_mask, False, logits), image_bias, offset)
    picks, is_fixed = _picks(rules.ranking_keys(unbiased + offset), fix_routing_mask, unmapped_topk_idx, num_topk)
    weights = _weights(unbiased, picks, _sum_in_pairs(_scores_at(unbiased, picks)), routed_scaling_factor)
    experts, weights = rules.with_shared(picks, weights, num_routed, num_shared)
    experts = rules.physical_experts(experts, to_physical_map, logical_count, ep_rank)

    is_random = rules.flags_or(force_random, False, logits)
    is_routed = rules.flags_or(mask, True, logits)
    limit = num_routed + num_shared
    if to_physical_map is not None and logical_count is not None:
        limit = int(rules.limited_counts(to_physical_map, logical_count).sum())
    random = rules.random_experts(logits.shape[0], num_topk + num_shared, limit, ep_rank, logits.device)
    experts, weights = torch.where(is_random, random[0], experts), torch.where(is_random, random[1], weights)
    by_scores = is_routed & ~is_random
    return (
        *_unmapped(unmapped_topk_idx, picks, by_scores, is_fixed),
        *(() if scores is None else (torch.where(by_scores, unbiased, 0.0),)),
        torch.where(is_routed, experts, -1),
        torch.where(is_routed, weights, 0.0),
    )


def moe_topk_gate_backward(
    scores: torch.Tensor,
    topk_idx: torch.Tensor,
    topk_weights: torch.Tensor,
    grad_topk_weights: torch.Tensor,
    mask: torch.Tensor | None = None,
    grad_scores_sum: torch.Tensor | None = None,
    *,
    routed_scaling_factor: float,
) -> torch.Tensor:
    """Return the gradient of the logits, computed in float64. See ``tkbuild.ops.moe.moe_topk_gate_backward``."""
    num_tokens, num_routed = scores.shape
    u, weights, grads = scores.double(), topk_weights.double(), grad_topk_weights.double()
    picks = rules.fixed_experts(topk_idx, num_routed)
    valid = picks >= 0
    dot = torch.where(valid, grads * weights, 0.0).sum(-1, keepdim=True)
    of_picks = (routed_scaling_factor * grads - dot) / (_scores_at(u, picks).sum(-1, keepdim=True) + 1e-20)
    grad = torch.zeros_like(u).scatter_add(1, picks.clamp(min=0), torch.where(valid, of_picks, 0.0))
    if grad_scores_sum is not None and num_tokens:
        h = grad_scores_sum.double().repeat_interleave(num_tokens // grad_scores_sum.shape[0], 0)
        sums = u.sum(-1, keepdim=True)
        inverse = torch.where(rules.flags_or(mask, True, scores) & (sums != 0.0), 1.0 / sums, 0.0)
        grad = grad + (h - (h * u).sum(-1, keepdim=True) * inverse) * inverse
    slope = torch.where(u == 0.0, 0.0, -0.5 * torch.expm1(-u * u) / u)
    changed = grad != 0.0  # elsewhere the result is 0, whatever the score
    return torch.where(changed, slope * grad, 0.0).float()


def _in_best_groups(ranking: torch.Tensor, num_groups: int, num_topk_groups: int) -> torch.Tensor:
    """Return for each expert (T, R) whether its group is among the best by the sum of two."""
    groups = ranking.view(ranking.shape[0], num_groups, -1)
    best = topk_sum_and_topk_group_idx(groups, num_topk_sum=2, num_topk_groups=num_topk_groups)
    kept = torch.zeros(groups.shape[:2], dtype=torch.bool, device=ranking.device).scatter(1, best, True)
    return kept.repeat_interleave(groups.shape[2], 1)


def _picks(
    keys: torch.Tensor, fix_routing_mask: torch.Tensor | None, given: torch.Tensor | None, num_topk: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the experts of the routed slots, and which tokens have those that the caller gave."""
    picks = rules.ranked(keys, num_topk)
    is_fixed = rules.flags_or(fix_routing_mask if given is not None else None, False, keys)
    return picks if given is None else torch.where(is_fixed, rules.fixed_experts(given, keys.shape[1]), picks), is_fixed


def _scores_at(scores: torch.Tensor, picks: torch.Tensor) -> torch.Tensor:
    return torch.where(picks >= 0, scores.gather(1, picks.clamp(min=0)), 0.0)


def _weights(scores: torch.Tensor, picks: torch.Tensor, sums: torch.Tensor, factor: float) -> torch.Tensor:
    return torch.where(picks >= 0, _scores_at(scores, picks) / sums.view(-1, 1) * factor, 0.0)


def _sum_in_order(values: torch.Tensor) -> torch.Tensor:
    total = torch.full_like(values[:, 0], 1e-20)
    for column in values.unbind(1):
        total = total + column
    return total


def _sum_in_pairs(values: torch.Tensor) -> torch.Tensor:
    lanes = torch.nn.functional.pad(values, (0, rules.MAX_SLOTS - values.shape[1]))
    while lanes.shape[1] > 1:
        half = lanes.shape[1] // 2
        lanes = lanes[:, :half] + lanes[:, half:]
    return lanes[:, 0] + 1e-20


def _of_tp_rank(experts: torch.Tensor, per_rank: int, tp_rank: int, num_tp_ranks: int) -> torch.Tensor:
    """Return the numbers that physical experts have on ``tp_rank``, -1 for those of other ranks."""
    local = experts - tp_rank * per_rank
    local = local - local // (per_rank * num_tp_ranks) * (per_rank * num_tp_ranks - per_rank)
    return torch.where((experts >= 0) & (experts // per_rank % num_tp_ranks == tp_rank), local, -1)


def _unmapped(
    given: torch.Tensor | None, picks: torch.Tensor, by_scores: torch.Tensor, is_fixed: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    return () if given is None else (torch.where(by_scores, torch.where(is_fixed, given, picks), -1),)

"""Gates: which experts each token goes to, and with what weights."""

from __future__ import annotations

import torch

from tkbuild.errors import ArgumentError
from tkbuild.runtime.op import kernel_op

_topk_gate = kernel_op("moe.topk_gate")
_forward = kernel_op("moe.moe_topk_gate_forward")
_backward = kernel_op("moe.moe_topk_gate_backward")
_MAX_TOPK = 32
_SCORING = "sqrtsoftplus"


def topk_gate(scores: torch.Tensor, num_topk: int) -> torch.Tensor:
    """Return the indices of the ``num_topk`` largest scores of each row, in descending order.

    Ties go to the smaller index, as in a stable descending sort. Indices are unique and in [0, E) whatever the scores:
    NaN ranks below every number.
    Shapes: scores (T, E), 1 <= num_topk <= min(32, E) -> (T, num_topk); T may be 0.  Dtypes: float32 -> int64.
    Layout: contiguous.  Runs on the current stream of the scores' device.
    Raises: ArgumentError, NoVariantError, LaunchError.
    """
    if not 1 <= num_topk <= _MAX_TOPK:
        raise ArgumentError(f"moe.topk_gate: num_topk is {num_topk}, expected 1 to {_MAX_TOPK}", num_topk=num_topk)
    result: torch.Tensor = _topk_gate((scores,), (), (num_topk,))
    return result


def moe_topk_gate_forward(
    logits: torch.Tensor,
    num_topk: int,
    use_shared_as_routed: bool,
    num_shared_experts: int,
    routed_scaling_factor: float,
    ep_rank: int,
    scoring_func: str = _SCORING,
    mask: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    image_bias: torch.Tensor | None = None,
    image_token_mask: torch.Tensor | None = None,
    fix_routing_mask: torch.Tensor | None = None,
    to_physical_map: torch.Tensor | None = None,
    logical_count: torch.Tensor | None = None,
    unmapped_topk_idx: torch.Tensor | None = None,
    force_random: torch.Tensor | None = None,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
    scores: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (topk_idx, topk_weights): the experts of each token and their weights.

    A score is sqrt(x > 20 ? x : log1p(exp(x))) of a logit. The ``num_topk`` experts with the largest scores plus ``bias`` are
    picked, in descending order; ties go to the smaller index and NaN ranks below every number. The weight of a pick is its score,
    without the bias, over the sum of those of all picks plus 1e-20, times ``routed_scaling_factor``; a NaN or infinite score
    among the picks makes NaN. The sum is taken in pairs of distance 16, 8, 4, 2, 1. With ``use_shared_as_routed`` the slots
    behind the picks hold the S = ``num_shared_experts`` shared experts R, R + 1, each of weight 1.

    mask: tokens where it is False have -1 and weight 0 in all slots.
    image_bias: instead of ``bias`` for tokens where ``image_token_mask`` is True.
    fix_routing_mask: tokens where it is True take their picks from ``unmapped_topk_idx``; numbers out of [0, R) there count as no
    expert: -1 and weight 0.
    to_physical_map: the copies of each expert, the first ``logical_count`` of a row. Token t takes copy
    (ep_rank + 23333 t) mod count; counts are limited to [1, D].
    unmapped_topk_idx: receives the picks before they are mapped, for tokens that do not take theirs from it.
    force_random: tokens where it is True get different physical experts and weights in (0, 1] at random, reproducibly; slot j of
    token t draws from sequence 32 t + j of Philox4x32-10 with seed ``ep_rank``. Their unmapped_topk_idx is -1.
    scores: receives the scores, 0 for tokens without mask or with random experts.
    out: (topk_idx, topk_weights), written instead of new tensors.

    Shapes: logits, scores (T, R), R <= 1024 a multiple of 4; bias, image_bias (R); masks (T); to_physical_map (R + S, D);
    logical_count (R + S); unmapped_topk_idx (T, num_topk) -> (T, num_topk + S), num_topk + S <= 32; T may be 0.
    Dtypes: float32; masks bool; maps and counts int32; indices int64.
    Layout: contiguous, at addresses of 16 bytes; rows of logits may lie apart by a multiple of 4, those of unmapped_topk_idx by
    any number from num_topk on.
    Raises: ArgumentError, NoVariantError, LaunchError.
    """
    name = "moe.moe_topk_gate_forward"
    _check_scoring(name, scoring_func)
    check_pairs(name, to_physical_map, logical_count, fix_routing_mask, unmapped_topk_idx)
    if (image_bias is None) != (image_token_mask is None):
        raise ArgumentError(f"{name}: image_bias and image_token_mask are not given together, expected both or neither")
    num_shared = shared_slots(name, use_shared_as_routed, num_shared_experts)
    tensors = (
        *(logits, flat(mask), bias, image_bias, flat(image_token_mask), flat(fix_routing_mask)),
        *(to_physical_map, logical_count, flat(force_random), unmapped_topk_idx, scores),
    )
    scalars = (num_topk, num_shared, float(routed_scaling_factor), ep_rank)
    result: tuple[torch.Tensor, torch.Tensor] = _forward(tensors, (), scalars, None if out is None else tuple(out))
    return result


moe_topk_gate = moe_topk_gate_forward


def moe_topk_gate_backward(
    scores: torch.Tensor,
    topk_idx: torch.Tensor,
    topk_weights: torch.Tensor,
    grad_topk_weights: torch.Tensor,
    routed_scaling_factor: float,
    scoring_func: str = _SCORING,
    mask: torch.Tensor | None = None,
    grad_scores_sum: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the gradient of the logits of ``moe_topk_gate_forward``, whose ``scores`` and picks are given.

    topk_idx: the picks before they were mapped, without shared experts; numbers out of [0, R) are ignored, and with them their
    weights and gradients. An expert that stands in several slots gets the sum of their gradients.
    grad_scores_sum, mask: the gradient of a sum over each of Q sequences of T / Q tokens: of a token's scores, divided by their sum.
    Tokens whose mask is False were left out of it, and so is one whose scores sum to 0. Without it the gradient of experts that
    were not picked is 0.
    Results differ from those of exact arithmetic by roundings of float32 and are the same on every run.

    Shapes: scores (T, R); topk_idx, topk_weights, grad_topk_weights (T, k), k <= 32; mask (T); grad_scores_sum (Q, R), Q divides T
    -> (T, R); T may be 0.  Dtypes: float32; topk_idx int64; mask bool.  Layout: elements of a row side by side, rows any stride;
    mask, grad_scores_sum and out contiguous.
    Raises: ArgumentError, NoVariantError, LaunchError.
    """
    name = "moe.moe_topk_gate_backward"
    _check_scoring(name, scoring_func)
    if (mask is None) != (grad_scores_sum is None):
        raise ArgumentError(f"{name}: mask and grad_scores_sum are not given together, expected both or neither")
    if grad_scores_sum is not None and (grad_scores_sum.dim() != 2 or grad_scores_sum.shape[0] == 0):
        raise ArgumentError(
            f"{name}: grad_scores_sum has shape {tuple(grad_scores_sum.shape)}, expected (sequences, R), at least one"
        )
    tensors = (scores, topk_idx, topk_weights, grad_topk_weights, flat(mask), grad_scores_sum)
    result: torch.Tensor = _backward(tensors, (), (float(routed_scaling_factor),), None if out is None else (out,))
    return result


def flat(flags: torch.Tensor | None) -> torch.Tensor | None:
    """Return flags, one for each token, in one dimension."""
    return flags if flags is None or flags.dim() == 1 else flags.reshape(-1)


def shared_slots(name: str, use_shared_as_routed: bool, num_shared_experts: int) -> int:
    """Return how many slots hold shared experts. Raises: ArgumentError unless there are 1 or 2 when they are used."""
    if not use_shared_as_routed:
        return 0
    if num_shared_experts not in (1, 2):
        raise ArgumentError(f"{name}: num_shared_experts is {num_shared_experts}, expected 1 or 2 with use_shared_as_routed")
    return num_shared_experts


def check_pairs(
    name: str,
    to_physical_map: torch.Tensor | None,
    logical_count: torch.Tensor | None,
    fix_routing_mask: torch.Tensor | None,
    unmapped_topk_idx: torch.Tensor | None,
) -> None:
    """Raises: ArgumentError when one of two tensors that belong together is missing, or a map has no columns."""
    if (to_physical_map is None) != (logical_count is None):
        raise ArgumentError(f"{name}: to_physical_map and logical_count are not given together, expected both or neither")
    if to_physical_map is not None and (to_physical_map.dim() != 2 or to_physical_map.shape[1] == 0):
        raise ArgumentError(
            f"{name}: to_physical_map has shape {tuple(to_physical_map.shape)}, expected (experts, copies), copies >= 1"
        )
    if fix_routing_mask is not None and unmapped_topk_idx is None:
        raise ArgumentError(f"{name}: fix_routing_mask without unmapped_topk_idx, expected the picks to take from")


def _check_scoring(name: str, scoring_func: str) -> None:
    if scoring_func != _SCORING:
        raise ArgumentError(f"{name}: scoring_func is {scoring_func!r}, expected {_SCORING!r}", scoring_func=scoring_func)

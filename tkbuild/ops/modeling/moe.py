"""A differentiable gate."""

from __future__ import annotations

from typing import Any

import torch

from tkbuild.errors import ArgumentError
from tkbuild.ops import moe
from tkbuild.runtime.op import new_empty

__all__ = ["moe_topk_gate"]


#: What the gate takes after the logits, in order.
_NAMES = (
    *("num_topk", "use_shared_as_routed", "num_shared_experts", "routed_scaling_factor", "ep_rank", "scoring_func"),
    *("mask", "bias", "image_bias", "image_token_mask", "fix_routing_mask", "to_physical_map", "logical_count"),
    *("unmapped_topk_idx", "force_random"),
)


class _TopkGate(torch.autograd.Function):
    """Saves the scores, the picks and the weights: the gradient needs no logits."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, num_seqs: int | None, *values: Any) -> tuple[torch.Tensor, ...]:
        given = dict(zip(_NAMES, values, strict=True))
        num_topk, unmapped, mask = given["num_topk"], given["unmapped_topk_idx"], given["mask"]
        scores = new_empty(logits, logits.shape, logits.dtype)
        topk_idx, topk_weights = moe.moe_topk_gate_forward(logits, **{**given, "scores": scores})
        ctx.save_for_backward(scores, topk_idx[:, :num_topk] if unmapped is None else unmapped, topk_weights, mask)
        ctx.num_topk, ctx.factor, ctx.num_seqs = num_topk, given["routed_scaling_factor"], num_seqs
        ctx.mark_non_differentiable(topk_idx)
        if num_seqs is None:
            return topk_idx, topk_weights
        return topk_idx, topk_weights, _sums_of_shares(scores, mask, num_seqs)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, _grad_idx: torch.Tensor, grad_weights: torch.Tensor, *grad_sums: torch.Tensor) -> tuple[Any, ...]:
        nothing = (None,) * (1 + len(_NAMES))
        if not ctx.needs_input_grad[0]:
            return None, *nothing
        scores, picks, weights, mask = ctx.saved_tensors
        of_sums = None
        if ctx.num_seqs is not None:
            of_sums = grad_sums[0].contiguous()
            mask = torch.ones(scores.shape[:1], dtype=torch.bool, device=scores.device) if mask is None else mask
        grad = moe.moe_topk_gate_backward(
            scores,
            picks,
            weights[:, : ctx.num_topk],
            grad_weights[:, : ctx.num_topk].contiguous(),
            ctx.factor,
            mask=None if of_sums is None else mask,
            grad_scores_sum=of_sums,
        )
        return grad, *nothing


def _sums_of_shares(scores: torch.Tensor, mask: torch.Tensor | None, num_seqs: int) -> torch.Tensor:
    """Return the sums over each sequence of scores divided by the sum of their token's; a token whose scores are 0 adds nothing."""
    sums = scores.sum(-1, keepdim=True)
    counts = sums != 0 if mask is None else (sums != 0) & mask.reshape(-1, 1)
    shares = torch.where(counts, scores / sums, 0.0)
    return shares.view(num_seqs, -1, scores.shape[1]).sum(1)


def moe_topk_gate(
    logits: torch.Tensor,
    num_topk: int,
    use_shared_as_routed: bool,
    num_shared_experts: int,
    routed_scaling_factor: float,
    ep_rank: int,
    scoring_func: str = "sqrtsoftplus",
    mask: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    image_bias: torch.Tensor | None = None,
    image_token_mask: torch.Tensor | None = None,
    fix_routing_mask: torch.Tensor | None = None,
    to_physical_map: torch.Tensor | None = None,
    logical_count: torch.Tensor | None = None,
    unmapped_topk_idx: torch.Tensor | None = None,
    force_random: torch.Tensor | None = None,
    num_seqs: int | None = None,
) -> tuple[torch.Tensor, ...]:
    """Return (topk_idx, topk_weights) of ``tkbuild.ops.moe.moe_topk_gate_forward``, and with ``num_seqs`` the sums of scores.

    Differentiable once with respect to ``logits``: through the weights of the picks, whose choice counts as constant, and through
    the sums. Random experts have no gradient.
    num_seqs: the tokens are this many sequences of equal length; the third result, (num_seqs, R), has for each the sum of its
    tokens' scores, those of a token divided by their sum. Tokens without mask and those whose scores are all 0 add nothing.
    unmapped_topk_idx: written as there; it must not change before the backward pass.
    Raises: ArgumentError, NoVariantError, LaunchError.
    """
    if num_seqs is not None and (num_seqs < 1 or logits.shape[0] % num_seqs):
        raise ArgumentError(f"moe_topk_gate: num_seqs is {num_seqs} for {logits.shape[0]} tokens, expected a divisor of the tokens")
    hides_picks = to_physical_map is not None or force_random is not None
    if unmapped_topk_idx is None and hides_picks:
        unmapped_topk_idx = torch.empty((logits.shape[0], num_topk), dtype=torch.int64, device=logits.device)
    values: tuple[Any, ...] = (
        *(num_topk, use_shared_as_routed, num_shared_experts, routed_scaling_factor, ep_rank, scoring_func),
        *(mask, bias, image_bias, image_token_mask, fix_routing_mask, to_physical_map, logical_count),
        *(unmapped_topk_idx, force_random),
    )
    if num_seqs is None and not (logits.requires_grad and torch.is_grad_enabled()):
        keywords: dict[str, Any] = dict(zip(_NAMES, values, strict=True))
        return moe.moe_topk_gate_forward(logits, **keywords)
    result: tuple[torch.Tensor, ...] = _TopkGate.apply(logits, num_seqs, *values)  # type: ignore[no-untyped-call]
    return result

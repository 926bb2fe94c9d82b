"""References of the gate's weights."""

from __future__ import annotations

import torch


def fused_weight(weight_hidden: torch.Tensor, weight_embed: torch.Tensor) -> torch.Tensor:
    """Return the element-wise product of the two weights in float32, which is exact.

    Shapes: weight_hidden, weight_embed and result (hc, H).  Dtypes: bfloat16 in, float32 out.
    """
    return weight_hidden.float() * weight_embed.float()


def grad_w_reduce(
    grad_w_partial: torch.Tensor,
    weight_hidden: torch.Tensor,
    weight_embed: torch.Tensor,
    grad_weight_hidden: torch.Tensor,
    grad_weight_embed: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the accumulated gradients of the two weights: the given ones plus the summed partials' share.

    Shapes: grad_w_partial (P, hc, H), the others and both results (hc, H).
    Dtypes: the weights bfloat16, everything else float32.
    The partials are added in the order of their index, starting from 0, and every product and sum is rounded to
    float32 by itself: grad_weight_hidden + total * weight_embed, grad_weight_embed + total * weight_hidden.
    """
    total = torch.zeros_like(grad_weight_hidden)
    for partial in grad_w_partial:
        total = total + partial
    return grad_weight_hidden + total * weight_embed.float(), grad_weight_embed + total * weight_hidden.float()

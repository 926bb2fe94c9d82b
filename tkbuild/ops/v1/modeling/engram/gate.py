"""The gate, differentiable, contract of release 1.0."""

from __future__ import annotations

import torch

from tkbuild.ops.modeling.engram.gate import apply_gate

__all__ = ["engram_gate"]


def engram_gate(
    hidden_states: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    weight_hidden: torch.Tensor,
    weight_embed: torch.Tensor,
    clamp_value: float,
    eps: float,
) -> torch.Tensor:
    """Return hidden_states with the gated value of each token added to its streams.

    See ``tkbuild.ops.modeling.engram.engram_gate``, but k is (..., hc, H) and v (..., H); their rows may lie apart.
    """
    return apply_gate(hidden_states, k, v, (weight_hidden, weight_embed), (clamp_value, eps), None)

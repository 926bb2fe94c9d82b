"""The gate, contract of release 1.0: keys and values are two tensors."""

from __future__ import annotations

import torch

from tkbuild.ops.engram.gate import Forward, backward, forward


def engram_gate_fwd(
    hidden_states: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    weight_fused: torch.Tensor,
    eps: float,
    clamp_value: float,
    save_for_backward: bool = True,
) -> Forward:
    """Add the gated value of each token to its streams; returns (output, dot, gate_score, rstd_x, rstd_k).

    See ``tkbuild.ops.engram.engram_gate_fwd``, but k is (T, hc, H) and v (T, H); their rows may lie apart, by multiples of 8 elements.
    """
    return forward(hidden_states, k, v, weight_fused, eps, clamp_value, save_for_backward, None, False)


def engram_gate_bwd(
    grad_out: torch.Tensor,
    hidden_states: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    weight_fused: torch.Tensor,
    dot: torch.Tensor,
    gate_score: torch.Tensor,
    rstd_x: torch.Tensor,
    rstd_k: torch.Tensor,
    clamp_value: float,
) -> tuple[torch.Tensor, ...]:
    """Return (grad_x, grad_k, grad_v, grad_w_partial). See ``tkbuild.ops.engram.engram_gate_bwd``, but k is (T, hc, H) and v (T, H)."""
    return backward(grad_out, hidden_states, k, v, weight_fused, (dot, gate_score, rstd_x, rstd_k), clamp_value, None, None)

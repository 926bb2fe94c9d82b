"""The gate: forward and backward, with keys and values in one tensor."""

from __future__ import annotations

import torch

from tkbuild.errors import ArgumentError
from tkbuild.runtime import get_num_sms
from tkbuild.runtime.op import kernel_op

__all__ = ["engram_gate_bwd", "engram_gate_fwd"]

Forward = tuple[torch.Tensor, "torch.Tensor | None", "torch.Tensor | None", "torch.Tensor | None", "torch.Tensor | None"]

_gate_fwd = kernel_op("engram.gate_fwd")
_gate_bwd = kernel_op("engram.gate_bwd")
#: Columns of a CTA of the backward kernel; two CTAs fit on an SM.
_CTA_COLUMNS, _CTAS_PER_SM, _LARGEST_CLUSTER = 2048, 2, 4


def engram_gate_fwd(
    hidden_states: torch.Tensor,
    kv: torch.Tensor,
    weight_fused: torch.Tensor,
    eps: float,
    clamp_value: float,
    save_for_backward: bool = True,
    image_token_mask: torch.Tensor | None = None,
    inplace: bool = False,
) -> Forward:
    """Add the gated value of each token to its streams; returns (output, dot, gate_score, rstd_x, rstd_k).

    For x of hidden_states, and streams 0..hc-1 of kv as k, the last one as v: dot = sum(x * weight_fused * k); rstd = 1 / sqrt(mean of
    squares + eps); d = dot * rstd_x * rstd_k / sqrt(H); gate_score = sigmoid(copysign(sqrt(max(|d|, clamp_value)), d));
    output = x + gate_score * v, rounded once. All in float32. Image tokens keep x; their statistics are undefined.

    Shapes: hidden_states, output (T, hc, H), H a multiple of 8 up to 8192, hc up to 64; kv (T, hc + 1, H); weight_fused (hc, H);
    image_token_mask (T); the statistics (T, hc), None without ``save_for_backward``. T may be 0.
    Dtypes: hidden_states, kv, output bfloat16; image_token_mask bool; the others float32.
    Layout: contiguous; the rows of kv may lie apart, by multiples of 8 elements. ``inplace`` writes into hidden_states.
    Raises: ArgumentError, NoVariantError, LaunchError; ``inplace`` excludes ``save_for_backward``.
    """
    check_kv("engram.gate_fwd", hidden_states, kv)
    if inplace and save_for_backward:
        raise ArgumentError(
            "engram.gate_fwd: inplace is True, expected save_for_backward=False: the backward pass needs hidden_states"
        )
    k, v = split_kv(kv)
    return forward(hidden_states, k, v, weight_fused, eps, clamp_value, save_for_backward, image_token_mask, inplace)


def engram_gate_bwd(
    grad_out: torch.Tensor,
    hidden_states: torch.Tensor,
    kv: torch.Tensor,
    weight_fused: torch.Tensor,
    dot: torch.Tensor,
    gate_score: torch.Tensor,
    rstd_x: torch.Tensor,
    rstd_k: torch.Tensor,
    clamp_value: float,
    image_token_mask: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of ``engram_gate_fwd``: (grad_x, grad_kv, grad_w_partial).

    grad_w_partial has partial sums of the gradient of weight_fused, for ``grad_w_reduce``: P of them, as many as work at one time,
    at most two for each SM in use and none without tokens. P and H decide the order of the sums. Where the forward clamped, no
    gradient passes through the gate. Image tokens hand grad_out on to hidden_states and give nothing to the others.

    Shapes: grad_out, grad_x (T, hc, H), hc = 4; grad_kv (T, hc + 1, H); grad_w_partial (P, hc, H); the others as in the forward.
    Dtypes: grad_out, grad_x, grad_kv bfloat16; grad_w_partial float32.  Layout: as the forward.
    Raises: ArgumentError, NoVariantError, LaunchError.
    """
    check_kv("engram.gate_bwd", hidden_states, kv)
    saved = (dot, gate_score, rstd_x, rstd_k)
    return backward_of_kv(grad_out, hidden_states, kv, weight_fused, saved, clamp_value, image_token_mask)


def forward(
    hidden_states: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    weight_fused: torch.Tensor,
    eps: float,
    clamp_value: float,
    save_for_backward: bool,
    image_token_mask: torch.Tensor | None,
    inplace: bool,
) -> Forward:
    """``engram_gate_fwd`` with keys and values apart, unchecked."""
    saved: tuple[torch.Tensor | None, ...] = (None,) * 4
    if save_for_backward:
        shape, device = hidden_states.shape[:2], hidden_states.device
        saved = tuple([torch.empty(shape, dtype=torch.float32, device=device) for _ in range(4)])
    tensors = (hidden_states, k, v, weight_fused, image_token_mask, *saved)
    output = _gate_fwd(tensors, (), (eps, clamp_value), (hidden_states,) if inplace else None)
    return (output, *saved)


def backward(
    grad_out: torch.Tensor,
    hidden_states: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    weight_fused: torch.Tensor,
    saved: tuple[torch.Tensor, ...],
    clamp_value: float,
    image_token_mask: torch.Tensor | None,
    outs: tuple[torch.Tensor, ...] | None,
) -> tuple[torch.Tensor, ...]:
    """Return the gradients of hidden_states, k, v, and partial sums of that of the weight, in ``outs`` if given; unchecked."""
    tensors = (grad_out, hidden_states, k, v, weight_fused, *saved, image_token_mask)
    result: tuple[torch.Tensor, ...] = _gate_bwd(tensors, (), (clamp_value, num_partials(hidden_states)), outs)
    return result


def backward_of_kv(
    grad_out: torch.Tensor,
    hidden_states: torch.Tensor,
    kv: torch.Tensor,
    weight_fused: torch.Tensor,
    saved: tuple[torch.Tensor, ...],
    clamp_value: float,
    image_token_mask: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``engram_gate_bwd``, unchecked."""
    grad_kv = torch.empty(kv.shape, dtype=kv.dtype, device=kv.device)
    grad_x = torch.empty(hidden_states.shape, dtype=hidden_states.dtype, device=hidden_states.device)
    shape = (num_partials(hidden_states), *weight_fused.shape)
    partial = torch.empty(shape, dtype=weight_fused.dtype, device=weight_fused.device)
    outs = (grad_x, *split_kv(grad_kv), partial)
    backward(grad_out, hidden_states, *split_kv(kv), weight_fused, saved, clamp_value, image_token_mask, outs)
    return grad_x, grad_kv, partial


def num_partials(hidden_states: torch.Tensor) -> int:
    """Return how many CTAs, or clusters of them, share the tokens of a backward call."""
    tokens, width = hidden_states.shape[0], hidden_states.shape[2]
    cluster = next((size for size in (1, 2) if width <= size * _CTA_COLUMNS), _LARGEST_CLUSTER)
    sms = get_num_sms(hidden_states.get_device()) if hidden_states.is_cuda else 1
    return min(max(1, sms * _CTAS_PER_SM // cluster), tokens)


def split_kv(kv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the keys and the values of ``kv`` as views."""
    return kv[:, :-1], kv[:, -1]


def check_kv(kernel: str, hidden_states: torch.Tensor, kv: torch.Tensor) -> None:
    """Raises: ArgumentError unless the shapes are (T, hc, H) and (T, hc + 1, H)."""
    wanted = (hidden_states.shape[0], hidden_states.shape[1] + 1, hidden_states.shape[2]) if hidden_states.dim() == 3 else None
    if wanted is None or tuple(kv.shape) != wanted:
        raise ArgumentError(
            f"{kernel}: hidden_states has shape {tuple(hidden_states.shape)} and kv {tuple(kv.shape)}, expected (T, hc, H) and (T, hc + 1, H)",
            kernel=kernel,
        )

"""The gate: forward and backward, with keys and values in one tensor."""

from __future__ import annotations

import torch

from tkbuild.errors import ArgumentError
from tkbuild.runtime import get_num_sms
from tkbuild.runtime.op import is_traced, kernel_op, new_empty, view_of

__all__ = ["engram_gate_bwd", "engram_gate_fwd"]

Forward = tuple[torch.Tensor, "torch.Tensor | None", "torch.Tensor | None", "torch.Tensor | None", "torch.Tensor | None"]

_gate_fwd = kernel_op("engram.gate_fwd")
_gate_bwd = kernel_op("engram.gate_bwd")
#: Columns of a CTA of the backward kernel, of which an SM has one; two share a wider row.
_CTA_COLUMNS = 4096


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
    at most one for each SM in use and none without tokens. P and H decide the order of the sums. Where the forward clamped, no
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
    """``engram_gate_fwd`` with keys and values apart, checked by the launcher only."""
    saved: tuple[torch.Tensor | None, ...] = (None,) * 4
    if save_for_backward:
        saved = tuple([new_empty(hidden_states, hidden_states.shape[:2], torch.float32) for _ in range(4)])
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
    grad_kv = new_empty(hidden_states, kv.shape, kv.dtype)
    grad_x = new_empty(hidden_states, hidden_states.shape, hidden_states.dtype)
    partial = new_empty(hidden_states, (num_partials(hidden_states), *weight_fused.shape), weight_fused.dtype)
    outs = (grad_x, *split_kv(grad_kv), partial)
    backward(grad_out, hidden_states, *split_kv(kv), weight_fused, saved, clamp_value, image_token_mask, outs)
    return grad_x, grad_kv, partial


def num_partials(hidden_states: torch.Tensor) -> int:
    """Return how many CTAs, or clusters of them, share the tokens of a backward call."""
    tokens, width = hidden_states.shape[0], hidden_states.shape[-1]
    sms = get_num_sms(hidden_states.get_device()) if hidden_states.is_cuda else 1
    return min(max(1, sms if width <= _CTA_COLUMNS else sms // 2), tokens)


def split_kv(kv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the keys and the values of ``kv`` as views."""
    if is_traced(kv):
        return kv[:, :-1], kv[:, -1]
    (tokens, streams, width), (token, stream, column) = kv.shape, kv.stride()
    values = view_of(kv, (tokens, width), (token, column), (streams - 1) * stream)
    return view_of(kv, (tokens, streams - 1, width), (token, stream, column), 0), values


def check_kv(kernel: str, hidden_states: torch.Tensor, kv: torch.Tensor) -> None:
    """Raises: ArgumentError unless the shapes are (T, hc, H) and (T, hc + 1, H)."""
    shape = hidden_states.shape
    if len(shape) != 3 or kv.shape != (shape[0], shape[1] + 1, shape[2]):
        raise ArgumentError(
            f"{kernel}: hidden_states has shape {tuple(hidden_states.shape)} and kv {tuple(kv.shape)}, expected (T, hc, H) and (T, hc + 1, H)",
            kernel=kernel,
        )

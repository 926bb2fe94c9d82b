"""References of the gate: forward and backward."""

from __future__ import annotations

import torch

Results = tuple[torch.Tensor, ...]


def gate_fwd(
    hidden_states: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    weight: torch.Tensor,
    image_token_mask: torch.Tensor | None,
    dot: torch.Tensor | None,
    gate_score: torch.Tensor | None,
    rstd_x: torch.Tensor | None,
    rstd_k: torch.Tensor | None,
    *,
    eps: float,
    clamp_value: float,
) -> Results:
    """Return x + gate * v, behind those of dot, gate, rstd_x and rstd_k for which a tensor is given.

    For x of hidden_states: dot = sum(x * weight * k), rstd = 1 / sqrt(sum of squares / H + eps), d = dot * rstd_x * rstd_k / sqrt(H) and
    gate = sigmoid(copysign(sqrt(max(|d|, clamp_value)), d)). Image tokens keep x, and what their statistics held.

    Shapes: hidden_states, k and the result (T, hc, H); v (T, H); weight (hc, H); image_token_mask (T); the statistics (T, hc).
    Dtypes: hidden_states, k, v and the result alike, bfloat16 or float64; weight float32 or float64; mask bool; statistics float32.
    """
    x, key, value = (_wide(t) for t in (hidden_states, k, v))
    width = x.shape[-1]
    raw = (x * weight * key).sum(-1)
    inverse_x, inverse_k = (torch.rsqrt(t.square().sum(-1) / width + eps) for t in (x, key))
    score = _gate(raw * inverse_x * inverse_k * width**-0.5, clamp_value)
    out = (x + score[..., None] * value[:, None]).to(hidden_states.dtype)
    image = _image_tokens(image_token_mask, x)
    pairs = ((dot, raw), (gate_score, score), (rstd_x, inverse_x), (rstd_k, inverse_k))
    statistics = [torch.where(image[:, None], old, new) for old, new in pairs if old is not None]
    return *statistics, torch.where(image[:, None, None], hidden_states, out)


def gate_bwd(
    grad_out: torch.Tensor,
    hidden_states: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    weight: torch.Tensor,
    dot: torch.Tensor,
    gate_score: torch.Tensor,
    rstd_x: torch.Tensor,
    rstd_k: torch.Tensor,
    image_token_mask: torch.Tensor | None,
    *,
    clamp_value: float,
    num_partials: int,
) -> Results:
    """Return the gradients of hidden_states, k and v, and partial sums of that of the weight.

    Row p of the last result, (num_partials, hc, H), has the sum over the tokens t with t % num_partials == p. Where the forward
    clamped, no gradient passes through the gate. Image tokens hand grad_out on to hidden_states and give nothing to the others.

    Shapes and dtypes: those of ``gate_fwd``; grad_out like hidden_states; partial sums in the dtype of the weight.
    """
    grad, x, key, value = (_wide(t) for t in (grad_out, hidden_states, k, v))
    width = x.shape[-1]
    image = _image_tokens(image_token_mask, x)[:, None, None]
    raw, score, inverse_x, inverse_k = (
        torch.where(image, 0.0, t[..., None].to(x.dtype)) for t in (dot, gate_score, rstd_x, rstd_k)
    )
    factor = inverse_x * inverse_k * width**-0.5
    slope = torch.where(raw.abs() * factor < clamp_value, 0.0, 0.5 * (factor / raw.abs()).sqrt())
    grad_raw = (grad * value[:, None]).sum(-1, keepdim=True) * score * (1 - score) * slope
    grad_raw = torch.where(image, 0.0, grad_raw)
    from_x = grad_raw * (key * weight - x * (raw * inverse_x.square() / width))
    from_k = grad_raw * (x * weight - key * (raw * inverse_k.square() / width))
    grad_x = torch.where(image, grad, grad + from_x)
    grad_k = torch.where(image, 0.0, from_k)
    grad_v = torch.where(image, 0.0, grad * score).sum(1)
    grad_weight = torch.where(image, 0.0, grad_raw * x * key)
    narrow = (t.to(hidden_states.dtype) for t in (grad_x, grad_k, grad_v))
    return *narrow, _sums_by_remainder(grad_weight, num_partials).to(weight.dtype)


def _gate(d: torch.Tensor, clamp_value: float) -> torch.Tensor:
    return torch.sigmoid(torch.copysign(d.abs().clamp_min(clamp_value).sqrt(), d))


def _wide(x: torch.Tensor) -> torch.Tensor:
    return x if x.dtype == torch.float64 else x.float()


def _image_tokens(mask: torch.Tensor | None, x: torch.Tensor) -> torch.Tensor:
    return torch.zeros(x.shape[0], dtype=torch.bool, device=x.device) if mask is None else mask


def _sums_by_remainder(rows: torch.Tensor, count: int) -> torch.Tensor:
    if count == 0:
        return rows.new_zeros((0, *rows.shape[1:]))
    missing = rows.new_zeros((-rows.shape[0] % count, *rows.shape[1:]))
    return torch.cat((rows, missing)).view(-1, count, *rows.shape[1:]).sum(0)

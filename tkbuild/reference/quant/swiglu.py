"""References of the SwiGLU operators: forward, backward, with and without a cast.

silu(l) = l / (1 + exp(-l)), each step rounded to float32. They equal the kernels bit for bit on a GPU only, whose exp the
kernels call too; on the CPU exp may differ by a unit in the last place.
"""

from __future__ import annotations

import torch

from tkbuild.reference.arithmetic import fma
from tkbuild.reference.quant.rules import block_amax, canonical_nan, column_major, expand, pack_ue8m0, round_to_e4m3, scales

Maybe = torch.Tensor | None
_F32_MAX = torch.finfo(torch.float32).max


def swiglu_forward_and_per_token_cast(
    x: torch.Tensor,
    pos_to_token_topk: Maybe,
    topk_weights: Maybe,
    pos_to_expert: Maybe,
    psum: Maybe,
    out: torch.Tensor,
    sf: torch.Tensor,
    clamped_count: Maybe,
    *,
    block: int,
    alignment: int,
    routed_scaling_factor: float,
    clamp_value: float,
    round_sf: int,
    amax_min: float,
) -> tuple[torch.Tensor, ...]:
    """Return (out, sf) and, if given, clamped_count, with the rows that count replaced by their activation, quantised.

    Row n counts unless pos_to_expert[n] < 0, or it lies outside every [align(psum[e - 1]), psum[e]). Its weight is
    topk_weights[pos_to_token_topk[n]], or topk_weights[n] without an index, times routed_scaling_factor; an index that names
    no weight gives 0. A negative clamp_value stands for none, block 0 for whole rows. clamped_count gains the
    numbers of gates above, ups above and ups below the limit and, if it has a fourth place, of the elements processed.

    Shapes: x (N, 2 H), topk_weights (W), psum (E), others (N); out (N, H), sf (N, blocks) or packed words of four.
    Dtypes: x bfloat16 or float32, out float8_e4m3fn, sf float32 or int32, clamped_count int64.
    """
    keep = _rows(x.shape[0], pos_to_expert, psum, alignment, x.device)
    weight = _weights(x.shape[0], pos_to_token_topk, topk_weights, routed_scaling_factor, x.device)
    packed = sf.dtype == torch.int32
    values = _activation(x, weight, clamp_value)
    columns = block or max(1, values.shape[1])
    fields, factors, inv = scales(block_amax(values, 1, columns), amax_min, rounded=packed or bool(round_sf))
    data = round_to_e4m3(values * expand(inv, 1, columns, values.shape))
    results = (_select(keep, data, out), _select(keep, pack_ue8m0(fields) if packed else factors, sf))
    return _with_counts(results, x, keep, clamp_value, clamped_count)


def swiglu_forward(
    x: torch.Tensor,
    pos_to_token_topk: Maybe,
    topk_weights: Maybe,
    pos_to_expert: Maybe,
    psum: Maybe,
    out: torch.Tensor,
    clamped_count: Maybe,
    *,
    alignment: int,
    routed_scaling_factor: float,
    clamp_value: float,
) -> tuple[torch.Tensor, ...]:
    """Return out (bfloat16 or float32) and, if given, clamped_count; see ``swiglu_forward_and_per_token_cast``."""
    keep = _rows(x.shape[0], pos_to_expert, psum, alignment, x.device)
    weight = _weights(x.shape[0], pos_to_token_topk, topk_weights, routed_scaling_factor, x.device)
    values = canonical_nan(_activation(x, weight, clamp_value).to(out.dtype))
    return _with_counts((_select(keep, values, out),), x, keep, clamp_value, clamped_count)


def swiglu_forward_and_per_channel_cast_and_transpose(
    x: torch.Tensor, *, block: int, transposed: int, clamp_value: float, round_sf: int, amax_min: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (data, sf) of the activation, rounded to bfloat16 and quantised with one scale for ``block`` rows of a column.

    The limit is rounded to bfloat16. Shapes: x (T, 2 H) -> data (H, T) if ``transposed``, else (T, H); sf (T / block, H).
    Dtypes: x bfloat16, data float8_e4m3fn, sf float32.
    """
    limit = clamp_value if clamp_value < 0 else torch.tensor(clamp_value).bfloat16().item()
    values = _activation(x, None, limit).bfloat16().float()
    _, sf, inv = scales(block_amax(values, block, 1), amax_min, rounded=bool(round_sf))
    data = round_to_e4m3(values * expand(inv, block, 1, values.shape))
    return data.T.contiguous() if transposed else data, sf


def swiglu_backward_mapped(
    x: torch.Tensor,
    x_sf: torch.Tensor,
    grad_out: torch.Tensor,
    weight: torch.Tensor,
    pos_to_token_topk: torch.Tensor,
    token_topk_to_pos: torch.Tensor,
    weight_grad: torch.Tensor,
    *,
    block: int,
    clamp_value: float,
    round_sf: int,
    amax_min: float,
) -> tuple[torch.Tensor, ...]:
    """Return (weight_grad, act, x_grad quantised, its scales, x_grad) of rows in the mapping layout.

    The weight of row n is that of slot pos_to_token_topk[n], 0 where that is no slot. weight_grad of a slot is that of row
    token_topk_to_pos[slot] if the row serves the slot, else 0; without rows it stays as it was.

    Shapes: x (N, 2 H), x_sf (N, 2 H / block), grad_out (N, H), weight (T, k), maps (N) and (T, k).
    Dtypes: x and its quantised gradient float8_e4m3fn, grad_out, act and x_grad bfloat16, others float32, maps int32.
    """
    rows = x.shape[0]
    row_weight = _weights(rows, pos_to_token_topk, weight.flatten(), 1.0, x.device)
    act, gradient, sums = _backward(_dequantised(x, x_sf, block), grad_out, row_weight, clamp_value, quotient=True)
    data, sf, _ = _cast_rows(gradient, block, bool(round_sf), amax_min)
    served = weight_grad.clone() if rows == 0 else _sums_of_slots(sums, pos_to_token_topk, token_topk_to_pos)
    return served, canonical_nan(act.bfloat16()), data, sf, canonical_nan(gradient.bfloat16())


def swiglu_backward_and_per_token_cast(
    x: torch.Tensor,
    x_sf: torch.Tensor,
    act_x_grad: torch.Tensor,
    topk_weights: Maybe,
    psum: Maybe,
    weight_grad: Maybe,
    act: Maybe,
    *,
    block: int,
    sf_format: str,
    col_major: bool,
    alignment: int,
    routed_scaling_factor: float,
    clamp_value: float,
    round_sf: int,
    amax_min: float,
) -> tuple[torch.Tensor, ...]:
    """Return weight_grad and act, each if given, then x_grad, x_grad quantised and its scales, of rows in the prefix layout.

    Rows from psum[e - 1] to align(psum[e - 1]) are padding: all results are 0 there. The weight of row n is topk_weights[n] *
    routed_scaling_factor, 1 without weights; the gradient of topk_weights[n] is the sum over its row times that factor.

    Shapes: x (N, 2 H), x_sf (N, 2 H / block), act_x_grad (N, H), topk_weights (N), psum (E).
    Dtypes: x and its quantised gradient float8_e4m3fn, act_x_grad bfloat16 or float32, act and x_grad bfloat16.
    Layout: scales row-major, or with ``col_major`` strides (1, N rounded up to 4); 'ue8m0' packs four into an int32.
    """
    packed = sf_format == "ue8m0"
    given = (topk_weights, psum, weight_grad, act)
    values = _dequantised(x, x_sf, block)
    real, gradient, results = _prefix_backward(
        values, act_x_grad, given, torch.bfloat16, (alignment, routed_scaling_factor, clamp_value)
    )
    data, sf, fields = _cast_rows(gradient, block, packed or bool(round_sf), amax_min)
    sf = _select(real, pack_ue8m0(fields) if packed else sf, 0)
    return *results, _select(real, data, 0), column_major(sf) if col_major else sf


def swiglu_backward(
    x: torch.Tensor,
    act_x_grad: torch.Tensor,
    topk_weights: Maybe,
    psum: Maybe,
    weight_grad: Maybe,
    act: Maybe,
    *,
    out_dtype: str,
    alignment: int,
    routed_scaling_factor: float,
    clamp_value: float,
) -> tuple[torch.Tensor, ...]:
    """Return weight_grad and act, each if given, then x_grad; see ``swiglu_backward_and_per_token_cast``.

    Dtypes: x and act_x_grad bfloat16 or float32; act and x_grad ``out_dtype``.
    """
    given = (topk_weights, psum, weight_grad, act)
    rules = (alignment, routed_scaling_factor, clamp_value)
    return _prefix_backward(x.float(), act_x_grad, given, getattr(torch, out_dtype), rules)[2]


# ---- rows and weights


def _rows(rows: int, pos_to_expert: Maybe, psum: Maybe, alignment: int, device: torch.device) -> torch.Tensor:
    """Which rows count in the forward direction."""
    keep = torch.ones(rows, dtype=torch.bool, device=device)
    if pos_to_expert is not None:
        keep &= pos_to_expert >= 0
    if psum is not None:
        start, before_last_end = _segment_starts(rows, psum, alignment, device)
        keep &= before_last_end & (torch.arange(rows, device=device) >= start)
    return keep


def _segment_starts(rows: int, psum: torch.Tensor, alignment: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """For each row the last end at or before it, aligned, and whether an end comes after it."""
    ends = torch.cat((psum.new_zeros(1), psum)).long()
    passed = torch.searchsorted(ends, torch.arange(rows, device=device), right=True) - 1
    return -(-ends[passed] // alignment) * alignment, passed < psum.numel()


def _weights(rows: int, index: Maybe, weights: Maybe, scaling: float, device: torch.device) -> Maybe:
    """The weight of each row as a column; 0 for an index that names none."""
    if weights is None:
        return None
    at = torch.arange(rows, device=device) if index is None else index.long()
    exists = (at >= 0) & (at < weights.numel())
    padded = torch.cat((weights, weights.new_zeros(1)))
    # As a tensor, so that the factor is rounded to float32 first.
    scaled = padded[torch.where(exists, at, weights.numel())] * torch.tensor(scaling, dtype=torch.float32, device=device)
    return torch.where(exists, scaled, 0.0)[:, None]


def _select(keep: torch.Tensor, new: torch.Tensor, old: torch.Tensor | int) -> torch.Tensor:
    """``new`` (N, C) in the rows to keep, ``old`` elsewhere, byte by byte: some dtypes have no `where`."""
    old_bytes = _row_bytes(old) if isinstance(old, torch.Tensor) else old
    return torch.where(keep[:, None], _row_bytes(new), old_bytes).view(-1).view(new.dtype).view(new.shape)


def _row_bytes(x: torch.Tensor) -> torch.Tensor:
    """A copy, since not even a tensor that counts as contiguous need have the strides that a view in bytes asks for."""
    copy = x.new_empty(x.shape).copy_(x)
    return copy.view(-1).view(torch.uint8).view(x.shape[0], x.shape[1] * x.element_size())


# ---- forward


def _halves(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    gate, up = x.float().chunk(2, dim=1)
    return gate, up


def _limit(clamp_value: float, device: torch.device) -> torch.Tensor:
    """The limit in float32; infinite if there is none."""
    return torch.tensor(float("inf") if clamp_value < 0 else clamp_value, dtype=torch.float32, device=device)


def _limited(gate: torch.Tensor, up: torch.Tensor, clamp_value: float) -> tuple[torch.Tensor, torch.Tensor]:
    """gate with an upper limit, up with one on both sides; NaN stays NaN."""
    limit = _limit(clamp_value, gate.device)
    return torch.where(gate > limit, limit, gate), torch.where(up > limit, limit, torch.where(up < -limit, -limit, up))


def _activation(x: torch.Tensor, weight: Maybe, clamp_value: float) -> torch.Tensor:
    gate, up = _limited(*_halves(x), clamp_value)
    values = gate / (torch.exp(-gate) + 1) * up
    return values if weight is None else values * weight


def _with_counts(
    results: tuple[torch.Tensor, ...], x: torch.Tensor, keep: torch.Tensor, clamp_value: float, counts: Maybe
) -> tuple[torch.Tensor, ...]:
    if counts is None:
        return results
    gate, up = _halves(x[keep])
    limit = _limit(clamp_value, x.device)
    elements = torch.tensor(gate.numel(), device=x.device)
    found = torch.stack([(gate > limit).sum(), (up > limit).sum(), (up < -limit).sum(), elements])
    return *results, counts + found[: counts.numel()]


# ---- backward


def _dequantised(x: torch.Tensor, x_sf: torch.Tensor, block: int) -> torch.Tensor:
    return x.float() * expand(x_sf, 1, block, x.shape)


def _backward(
    x: torch.Tensor, grad_out: torch.Tensor, weight: Maybe, clamp_value: float, *, quotient: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (weighted activation, gradient of x, sum over each row of gradient times activation), all float32.

    quotient: silu by a division, else from the reciprocal and the remainder that it leaves.
    """
    raw_gate, raw_up = x.chunk(2, dim=1)
    gate, up = _limited(raw_gate, raw_up, clamp_value)
    limit = _limit(clamp_value, x.device)
    grad = grad_out.float()
    t = torch.exp(-gate) + 1
    s = torch.ones_like(t) / t
    silu = gate / t if quotient else _silu_from_reciprocal(gate, t, s)
    activation = silu * up
    factor = torch.ones_like(grad[:, :1]) if weight is None else weight
    h = grad * factor * s
    gate_grad = torch.where(raw_gate > limit, 0.0, h * up * fma(gate, 1 - s, torch.ones_like(s)))
    up_grad = torch.where((raw_up > limit) | (raw_up < -limit), 0.0, h * gate)
    sums = (grad * activation).sum(dim=1, dtype=torch.float64).float()
    return activation * factor, torch.cat((gate_grad, up_grad), dim=1), sums


def _silu_from_reciprocal(gate: torch.Tensor, t: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
    product = gate * s
    rest = fma(product, t.clamp(max=_F32_MAX), -gate)
    return fma(-rest, s, product)


def _cast_rows(values: torch.Tensor, block: int, rounded: bool, amax_min: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (data, sf, exponent fields) of ``values`` in blocks of one row and ``block`` columns."""
    fields, sf, inv = scales(block_amax(values, 1, block), amax_min, rounded=rounded)
    return round_to_e4m3(values * expand(inv, 1, block, values.shape)), sf, fields


def _sums_of_slots(sums: torch.Tensor, slot_of_row: torch.Tensor, row_of_slot: torch.Tensor) -> torch.Tensor:
    slots = torch.arange(row_of_slot.numel(), device=sums.device).view(row_of_slot.shape)
    row = row_of_slot.long().clamp(0, sums.numel() - 1)
    serves = (row == row_of_slot) & (slot_of_row[row] == slots)
    return torch.where(serves, sums[row], 0.0)


def _prefix_backward(
    x: torch.Tensor,
    grad: torch.Tensor,
    given: tuple[Maybe, Maybe, Maybe, Maybe],
    out_dtype: torch.dtype,
    rules: tuple[int, float, float],
) -> tuple[torch.Tensor, torch.Tensor, tuple[torch.Tensor, ...]]:
    """Return (which rows are no padding, gradient in float32, (weight_grad, act, each if given, x_grad))."""
    topk_weights, psum, weight_grad, act = given
    alignment, scaling, clamp_value = rules
    rows = x.shape[0]
    real = torch.ones(rows, dtype=torch.bool, device=x.device)
    if psum is not None:
        real = torch.arange(rows, device=x.device) >= _segment_starts(rows, psum, alignment, x.device)[0]
    weight = _weights(rows, None, topk_weights, scaling, x.device)
    activation, gradient, sums = _backward(x, grad, weight, clamp_value, quotient=False)
    results = [_select(real, canonical_nan(gradient.to(out_dtype)), 0)]
    if act is not None:
        results.insert(0, _select(real, canonical_nan(activation.to(out_dtype)), 0))
    if weight_grad is not None and topk_weights is not None:
        factor = torch.tensor(scaling, dtype=torch.float32, device=x.device)
        results.insert(0, torch.where(real, sums * factor, 0.0))
    elif weight_grad is not None:
        results.insert(0, weight_grad)
    return real, gradient, tuple(results)

"""References of RMSNorm: forward, forward with a cast behind it, backward.

The sums over a row are taken in the order of the kernels, which is one for all archs and SM counts, so that results can be
compared bit for bit.
"""

from __future__ import annotations

import torch

from tkbuild.reference.quant.rules import block_amax, canonical_nan, expand, pack_ue8m0, round_to_e4m3, scales

_BLOCK = 32
_LANES = 32
_VECTOR_BYTES = 16
_FORWARD_VECTORS = 8
_BACKWARD_COLUMNS = 32
_CHUNK_ROWS = 1 << 16
_SF_PITCH = 4
_MEGA_MOE_TILE = 128

Results = tuple[torch.Tensor, ...]


def norm_forward(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    residual: torch.Tensor | None,
    residual_out: torch.Tensor | None,
    rstd: torch.Tensor | None,
    *,
    eps: float,
    out_scale: float,
) -> Results:
    """Return the normalised rows, behind z (for ``residual_out``) and rstd where a tensor for them is given.

    z = x, or x + residual rounded to the dtype; rstd = 1 / sqrt(sum(z * z) * (1 / H) + eps) in float32; the result is
    (z * rstd) * (weight * out_scale), every product rounded to float32 and the last one to the dtype.

    Shapes: x, residual (B, T, H) -> the same; weight (H); rstd (B, T). Dtypes: bfloat16 or float32, rstd float32.
    NaN results have all bits of exponent and mantissa set and no sign, as those of the GPU.
    """
    z, factor, y = _normalise(x, weight, residual, eps, out_scale)
    return *_given((residual_out, z), (rstd, factor)), y


def norm_forward_and_per_token_cast(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    residual: torch.Tensor | None,
    residual_out: torch.Tensor | None,
    out_bf16: torch.Tensor | None,
    rstd: torch.Tensor | None,
    mega_moe_sf: torch.Tensor | None,
    *,
    sf_format: str,
    col_major: bool,
    eps: float,
    out_scale: float,
    round_sf: int,
    amax_min: float,
    mega_moe_block_m: int,
) -> Results:
    """Return (data, sf): the rows of ``norm_forward`` cast to e4m3 in blocks of 32 columns, as ``per_token_cast`` does.

    In front of them stand, where a tensor for them is given, z, the rows in bfloat16, rstd, and ``mega_moe_sf`` with the
    packed scales of row t in row t // m * align(m, 128) + i // 128 * 128 + i % 32 * 4 + i % 128 // 32, i = t % m, m the
    block's rows.

    Shapes: data (B, T, H); sf (B, T, ceil(H / 32)), packed (B, T, ceil(H / 128)). Layout: sf row-major, or with
    ``col_major`` strides (.., 1, T rounded up to 4) in each batch.
    """
    packed = sf_format == "ue8m0"
    z, factor, y = _normalise(x, weight, residual, eps, out_scale)
    rows = y.float().flatten(0, 1)
    fields, sf, inv = scales(block_amax(rows, 1, _BLOCK), amax_min, rounded=packed or bool(round_sf))
    data = round_to_e4m3(rows * expand(inv, 1, _BLOCK, rows.shape)).view(y.shape)
    words = pack_ue8m0(fields)
    sf = (words if packed else sf).unflatten(0, y.shape[:2])
    second = None if mega_moe_sf is None else _with_words(mega_moe_sf, words, mega_moe_block_m)
    given = _given((residual_out, z), (out_bf16, canonical_nan(y.bfloat16())), (rstd, factor), (mega_moe_sf, second))
    return *given, data, _column_major(sf) if col_major else sf


def norm_backward(
    out_grad: torch.Tensor,
    x: torch.Tensor,
    rstd: torch.Tensor,
    weight: torch.Tensor | None,
    residual_out_grad: torch.Tensor | None,
    weight_grad: torch.Tensor | None,
    _partial: torch.Tensor,
    *,
    grad_dtype: str,
    num_partials: int,
    out_scale: float,
    accumulate: int,
) -> Results:
    """Return x_grad, behind weight_grad where that is given.

    With xh = x * rstd, q = out_grad * weight, a = out_scale * rstd and c = sum(xh * q) * (1 / H) * a: x_grad = q * a - xh * c,
    plus residual_out_grad; every operation is rounded to float32, the result to the dtype. weight_grad is out_scale times the
    sum of xh * out_grad over the rows, here in float64, in ``grad_dtype``; ``accumulate`` adds it to what was there.

    Shapes: out_grad, x, residual_out_grad (T, H), rstd (T), weight (H). Dtypes: bfloat16 or float32, rstd float32.
    """
    del num_partials  # the order of a sum that is taken in float64
    parts = [
        _backward_rows(*chunk, weight=weight, out_scale=out_scale)
        for chunk in zip(out_grad.split(_CHUNK_ROWS), x.split(_CHUNK_ROWS), rstd.split(_CHUNK_ROWS), strict=True)
    ]
    x_grad = torch.cat([rows for rows, _ in parts])
    if residual_out_grad is not None:
        x_grad = x_grad + residual_out_grad.float()
    total = torch.stack([sums for _, sums in parts]).sum(dim=0) * out_scale
    if weight_grad is not None and accumulate:
        total = weight_grad.double() + total
    grad = total.float().to(getattr(torch, grad_dtype))
    return *_given((weight_grad, grad)), canonical_nan(x_grad.to(x.dtype))


def _backward_rows(
    out_grad: torch.Tensor, x: torch.Tensor, rstd: torch.Tensor, *, weight: torch.Tensor | None, out_scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradient of rows in float32, and the sum of xh * out_grad over them in float64."""
    grad = out_grad.float()
    xh = x.float() * rstd[:, None]
    q = grad if weight is None else grad * weight.float()
    sums = _row_sums(xh * q, _VECTOR_BYTES // x.element_size(), _BACKWARD_COLUMNS)
    a = rstd * torch.full_like(rstd, out_scale)
    c = _mean(sums, x.shape[1]) * a
    return q * a[:, None] - xh * c[:, None], (xh.double() * grad).sum(dim=0)


def _normalise(
    x: torch.Tensor, weight: torch.Tensor | None, residual: torch.Tensor | None, eps: float, out_scale: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """z and the normalised rows in x's dtype, and 1 / sqrt of their mean squares; (B, T, H), (B, T, H), (B, T)."""
    z = x if residual is None else canonical_nan((x.float() + residual.float()).to(x.dtype))
    rows = z.flatten(0, 1)
    vector = _VECTOR_BYTES // x.element_size()
    squares = (chunk.float().square() for chunk in rows.split(_CHUNK_ROWS))
    sums = torch.cat([_row_sums(chunk, vector, _FORWARD_VECTORS * vector) for chunk in squares])
    mean = _mean(sums, x.shape[2])
    # Exact in float32: no quotient of a float32 lies so near the middle of two that rounding twice could err.
    rstd = canonical_nan((1.0 / (mean + torch.full_like(mean, eps)).double().sqrt()).float()).view(x.shape[:2])
    factor = torch.ones(x.shape[2], device=x.device) if weight is None else weight.float()
    y = (z.float() * rstd[..., None]) * (factor * torch.full_like(factor, out_scale))
    return z, rstd, canonical_nan(y.to(x.dtype))


def _row_sums(terms: torch.Tensor, vector: int, lane_columns: int) -> torch.Tensor:
    """Sum (R, H) float32 over the columns in the kernels' order.

    Lanes own vectors of ``vector`` columns in turn; there are as many as the least power of two of warps that suffices with
    ``lane_columns`` for each lane. A lane adds up each of its vectors, then the vectors; the lanes' sums are added up as a
    binary tree, neighbours first.
    """
    rows, columns = terms.shape
    lanes = _LANES
    while lanes * lane_columns < columns:
        lanes *= 2
    padded = torch.nn.functional.pad(terms, (0, lanes * lane_columns - columns))
    vectors = _sum_in_order(padded.view(rows, lane_columns // vector, lanes, vector), dim=3)
    sums = _sum_in_order(vectors, dim=1)
    while sums.shape[1] > 1:
        sums = sums[:, 0::2] + sums[:, 1::2]
    return sums[:, 0]


def _mean(sums: torch.Tensor, count: int) -> torch.Tensor:
    return sums * torch.full_like(sums, 1 / count)


def _sum_in_order(values: torch.Tensor, dim: int) -> torch.Tensor:
    total = torch.zeros_like(values.select(dim, 0))
    for part in values.unbind(dim):
        total = total + part
    return total


def _given(*pairs: tuple[torch.Tensor | None, torch.Tensor | None]) -> Results:
    """The second of each pair whose first is a tensor: the results that a call asked for."""
    return tuple(result for wanted, result in pairs if wanted is not None and result is not None)


def _with_words(mega_moe_sf: torch.Tensor, words: torch.Tensor, block: int) -> torch.Tensor:
    token = torch.arange(words.shape[0], device=words.device)
    i = token % block
    start = token // block * (-(-block // _MEGA_MOE_TILE) * _MEGA_MOE_TILE) + i // _MEGA_MOE_TILE * _MEGA_MOE_TILE
    result = mega_moe_sf.clone()
    result[start + i % 32 * 4 + i % _MEGA_MOE_TILE // 32] = words
    return result


def _column_major(sf: torch.Tensor) -> torch.Tensor:
    """A copy of ``sf`` (B, T, C) stored column by column in each batch, each column a multiple of 16 bytes."""
    batches, rows, columns = sf.shape
    pitch = -(-rows // _SF_PITCH) * _SF_PITCH
    stored = sf.new_empty(batches * columns * pitch).as_strided(sf.shape, (columns * pitch, 1, pitch))
    return stored.copy_(sf)

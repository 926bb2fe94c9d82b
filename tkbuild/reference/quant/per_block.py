"""References of the casts in blocks of rows and columns."""

from __future__ import annotations

import torch

from tkbuild.reference.quant.rules import (
    E2M1_MAX,
    E4M3_MAX,
    NAN_EXPONENT,
    block_amax,
    column_major,
    e2m1_values,
    expand,
    given_scales,
    pack_e2m1,
    pack_ue8m0,
    power_of_two,
    round_to_e2m1,
    round_to_e4m3,
    scales,
    unpack_e2m1,
    unpack_ue8m0,
)

_LARGEST = {"e4m3": E4M3_MAX, "e2m1": E2M1_MAX}
#: 6 * 2**6 is the largest product of an e2m1 number and a power of two that e4m3 holds.
_LOSSLESS_SHIFT = 6


def per_block_cast(
    x: torch.Tensor, *, fmt: str, sf_format: str, bm: int, bk: int, round_sf: int, amax_min: float, col_major: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise in blocks of ``bm`` rows and ``bk`` columns; return (data, sf).

    As ``per_token_cast`` with other blocks: NaN elements become the code of NaN, in e2m1 +6, and do not enter the scale;
    infinite ones make the scale of their own block infinite.

    Shapes: x (T, H) -> data (T, H), e2m1 (T, H / 2); sf (ceil(T / bm), ceil(H / bk)), packed (.., ceil(H / bk / 4)).
    Dtypes: x bfloat16 or float32; data float8_e4m3fn or int8; sf float32 or int32.
    Layout: data contiguous; sf row-major, or with ``col_major`` strides (1, rows of sf rounded up to 4).
    """
    fields, sf, inv = _scales(x, _LARGEST[fmt], bm, bk, amax_min, rounded=sf_format == "ue8m0" or bool(round_sf))
    return _codes(x.float() * expand(inv, bm, bk, x.shape), fmt), _stored(fields, sf, sf_format, col_major)


def per_block_cast_with_sf_only(
    x: torch.Tensor, *, sf_format: str, bm: int, bk: int, round_sf: int, amax_min: float, largest: float, col_major: bool
) -> torch.Tensor:
    """Return the scales of ``per_block_cast`` to a format whose greatest value is ``largest``."""
    fields, sf, _ = _scales(x, largest, bm, bk, amax_min, rounded=sf_format == "ue8m0" or bool(round_sf))
    return _stored(fields, sf, sf_format, col_major)


def per_block_cast_with_precomputed_sf(x: torch.Tensor, sf: torch.Tensor, *, fmt: str, bm: int, bk: int) -> torch.Tensor:
    """Return the data of x * (1 / sf), each rounded to float32, then to ``fmt``, saturating. sf float32, any strides."""
    return _codes(x.float() * expand(torch.ones_like(sf) / sf, bm, bk, x.shape), fmt)


def per_block_cast_lossless(
    data: torch.Tensor,
    x_sf: torch.Tensor | None,
    x_sf_packed: torch.Tensor | None = None,
    *,
    sf_format: str,
    xm: int,
    xk: int,
    bm: int,
    bk: int,
    col_major: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Turn e2m1 data with a power of two for each ``xm`` x ``xk`` block into e4m3 with one for each ``bm`` x ``bk`` block.

    The exponent field of a new scale is the largest of its blocks less 6, at least 0, or 255 if one is 255; the data are
    value * 2**(old field - new field), rounded to nearest even: exact while the fields of a block span at most 14.

    Shapes: data (T, H / 2), two columns in a byte; x_sf (ceil(T / xm), ceil(H / xk)), packed (.., ceil(H / xk / 4)) ->
    data (T, H), sf likewise for bm x bk. Dtypes: data int8 -> float8_e4m3fn; scales float32, of which only the exponent
    field counts, or int32, as either of the two arguments. A new field of 0 is the float32 number 0.
    """
    values = e2m1_values(unpack_e2m1(data))
    given = given_scales(x_sf, x_sf_packed)
    fields = unpack_ue8m0(given) if given.dtype == torch.int32 else (given.view(torch.int32) >> 23) & 0xFF
    columns = -(-values.shape[1] // xk)
    fields = fields[:, :columns]
    largest = block_amax(fields.float(), bm // xm, bk // xk).int()
    new = torch.where(largest == NAN_EXPONENT, largest, (largest - _LOSSLESS_SHIFT).clamp(min=0))
    shift = expand(fields, xm, xk, values.shape) - expand(new, bm, bk, values.shape)
    factor = power_of_two((shift + 127).clamp(min=1))
    return round_to_e4m3(values * factor), _stored(new, power_of_two(new), sf_format, col_major)


def _scales(
    x: torch.Tensor, largest: float, bm: int, bk: int, amax_min: float, *, rounded: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return scales(block_amax(x.float(), bm, bk), amax_min, rounded=rounded, largest=largest)


def _codes(values: torch.Tensor, fmt: str) -> torch.Tensor:
    return round_to_e4m3(values) if fmt == "e4m3" else pack_e2m1(round_to_e2m1(values))


def _stored(fields: torch.Tensor, sf: torch.Tensor, sf_format: str, col_major: bool) -> torch.Tensor:
    stored = pack_ue8m0(fields) if sf_format == "ue8m0" else sf
    return column_major(stored) if col_major else stored

"""References of the casts of rows that have one scale each, and of the 12-bit format e5m6."""

from __future__ import annotations

import torch

from tkbuild.reference.quant.rules import (
    E2M1_MAX,
    E4M3_MAX,
    E5M6_MAX,
    block_amax,
    column_major,
    pack_e2m1,
    pack_ue8m0,
    round_to_e2m1,
    round_to_e4m3,
    scales,
)

_LARGEST = {"e4m3": E4M3_MAX, "e2m1": E2M1_MAX, "e5m6": E5M6_MAX}
_HALF_MAGNITUDE = 0x7FFF
_E5M6_NAN = 0x7FF
_E5M6_DROPPED = 17  # bits of a float32 mantissa behind the six that e5m6 has
_ROWS_AT_ONCE = 2**16  # of memory for packing
_GROUP, _GROUP_BYTES = 8, 12  # elements in three words


def per_row_cast(
    x: torch.Tensor, *, fmt: str, sf_format: str, col_major: bool, round_sf: int, amax_min: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise each row with one scale; return (data, sf). Scales as in ``per_token_cast`` with blocks of H columns.

    Shapes: x (T, H) -> data (T, H), in e2m1 (T, H / 2), in e5m6 (T, 3 H / 2); sf (T, 1).
    Dtypes: x bfloat16 or float32; data float8_e4m3fn, int8 of two e2m1 codes, or uint8 of packed e5m6 codes; sf float32, or
    int32 with the exponent in its lowest byte.
    """
    values = x.float()
    packed = sf_format == "ue8m0"
    amax = block_amax(values, 1, max(values.shape[1], 1))
    fields, sf, inv = scales(amax, amax_min, rounded=packed or bool(round_sf), largest=_LARGEST[fmt])
    stored = pack_ue8m0(fields) if packed else sf
    return _data(values * inv, fmt), column_major(stored) if col_major else stored


def _data(values: torch.Tensor, fmt: str) -> torch.Tensor:
    if fmt == "e5m6":
        return torch.cat([pack_e5m6(round_to_e5m6(rows)) for rows in values.split(_ROWS_AT_ONCE)])
    return round_to_e4m3(values) if fmt == "e4m3" else pack_e2m1(round_to_e2m1(values))


def round_to_e5m6(values: torch.Tensor) -> torch.Tensor:
    """Return the 12-bit codes (int32) of ``values`` (float32, magnitudes up to 65024 or NaN).

    The code is the upper 12 bits of the float16 that the value is truncated to, one more if the last 17 bits of the float32
    mantissa and the code's own last bit say so: nearest even for numbers from 2**-14 on. Below, those bits are not the ones
    that were cut off, and the code may be one too large or too small. NaN becomes 0x7FF.
    """
    bits = values.view(torch.int32)
    codes = _truncated_half_bits(values) >> 4
    behind = bits & ((1 << _E5M6_DROPPED) - 1)
    codes = codes + ((codes & 1) + behind > 1 << (_E5M6_DROPPED - 1)).to(torch.int32)
    return torch.where(values.isnan(), _E5M6_NAN, codes & 0xFFF)


def _truncated_half_bits(values: torch.Tensor) -> torch.Tensor:
    """Return the bits (int32, 0 to 65535) of ``values`` as float16, rounded towards zero."""
    half = values.half()
    magnitude = half.view(torch.int16).to(torch.int32) & _HALF_MAGNITUDE
    magnitude = magnitude - (half.float().abs() > values.abs()).to(torch.int32)
    return magnitude | (values.signbit().to(torch.int32) << 15)


def pack_e5m6(codes: torch.Tensor) -> torch.Tensor:
    """Pack ``codes`` (T, H) of 12 bits, H a multiple of 8, into uint8 (T, 3 H / 2).

    Eight codes fill three little-endian words, each from its most significant bit on.
    """
    rows, columns = codes.shape
    v = codes.view(rows, columns // _GROUP, _GROUP).long().unbind(2)
    words = (
        v[0] << 20 | v[1] << 8 | v[2] >> 4,
        (v[2] & 0xF) << 28 | v[3] << 16 | v[4] << 4 | v[5] >> 8,
        (v[5] & 0xFF) << 24 | v[6] << 12 | v[7],
    )
    bytes_ = [(word >> shift) & 0xFF for word in words for shift in (0, 8, 16, 24)]
    return torch.stack(bytes_, dim=2).to(torch.uint8).view(rows, columns // _GROUP * _GROUP_BYTES)

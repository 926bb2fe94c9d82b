"""References of the casts of rows in blocks of columns."""

from __future__ import annotations

import torch

from tkbuild.reference.quant.rules import block_amax, column_major, expand, pack_ue8m0, round_to_e4m3, scales


def per_token_cast(
    x: torch.Tensor, *, block: int, sf_format: str, round_sf: int, amax_min: float, col_major: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise each row in blocks of ``block`` columns; return (data, sf).

    sf_format 'f32': one float for each block; 'ue8m0': four exponent bytes to an int32, always rounded, 0 behind the last
    block. A NaN element becomes the code 0x7F and does not enter the scale. An infinite element makes sf infinite (byte
    255, NaN) and the block's codes 0, but its own 0x7F; other blocks do not change.

    Shapes: x (T, H) -> data (T, H), sf (T, ceil(H / block)), packed (T, ceil(H / block / 4)).
    Dtypes: x bfloat16 or float32; data float8_e4m3fn; sf float32 or int32.
    Layout: data contiguous; sf row-major, or with ``col_major`` strides (1, T rounded up to 4).
    """
    packed = sf_format == "ue8m0"
    values = x.float()
    fields, sf, inv = scales(block_amax(values, 1, block), amax_min, rounded=packed or bool(round_sf))
    data = round_to_e4m3(values * expand(inv, 1, block, x.shape))
    sf = pack_ue8m0(fields) if packed else sf
    return data, column_major(sf) if col_major else sf

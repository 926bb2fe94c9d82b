"""References of the casts of columns in blocks of rows."""

from __future__ import annotations

import torch

from tkbuild.reference.quant.rules import block_amax, expand, round_to_e4m3, scale_values, scales


def per_channel_cast(
    x: torch.Tensor,
    pos_to_token: torch.Tensor | None = None,
    *,
    sf_format: str,
    rows: int,
    block: int,
    round_sf: int,
    amax_min: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise each column of ``rows`` rows in blocks of ``block`` rows; return (data, sf).

    pos_to_token (rows,) int32 says which row of x each row is; a number outside of x gives a row of zeros, and so do rows
    behind the last one of x without it. sf_format 'ue8m0': the fields of four blocks one under the other in an int32, always
    rounded, 0 behind the last block. NaN, infinities and zeros as in ``per_token_cast``.

    Shapes: x (T, H) -> data (rows, H), sf (ceil(rows / block), H), packed (ceil(rows / block / 4), H).
    Dtypes: x bfloat16 or float32; data float8_e4m3fn; sf float32 or int32.
    """
    return _cast(_gathered(x.float(), pos_to_token, rows), sf_format, block, round_sf, amax_min)


def per_channel_cast_quantised(
    x: torch.Tensor,
    x_sf: torch.Tensor,
    pos_to_token: torch.Tensor | None = None,
    *,
    sf_format: str,
    x_block: int,
    rows: int,
    block: int,
    round_sf: int,
    amax_min: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``per_channel_cast`` of x * x_sf, rounded to float32, where each x_sf covers ``x_block`` columns of a row.

    Dtypes: x float8_e4m3fn; x_sf float32, float8_e4m3fn or int32 of packed ue8m0, any strides.
    """
    values = x.float() * expand(scale_values(x_sf), 1, x_block, x.shape)
    return _cast(_gathered(values, pos_to_token, rows), sf_format, block, round_sf, amax_min)


def per_channel_cast_and_transpose(
    x: torch.Tensor, *, block: int, round_sf: int, amax_min: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """``per_channel_cast`` with the data transposed: (H, T), while sf stays (ceil(T / block), H)."""
    data, sf = _cast(x.float(), "f32", block, round_sf, amax_min)
    return data.view(torch.uint8).T.contiguous().view(data.dtype), sf


def _gathered(values: torch.Tensor, pos_to_token: torch.Tensor | None, rows: int) -> torch.Tensor:
    tokens, columns = values.shape
    pos = torch.arange(rows, device=values.device) if pos_to_token is None else pos_to_token.long()
    padded = torch.cat((values, values.new_zeros(1, columns)))
    return padded[torch.where((pos >= 0) & (pos < tokens), pos, tokens)]


def _cast(values: torch.Tensor, sf_format: str, block: int, round_sf: int, amax_min: float) -> tuple[torch.Tensor, torch.Tensor]:
    packed = sf_format == "ue8m0"
    fields, sf, inv = scales(block_amax(values, block, 1), amax_min, rounded=packed or bool(round_sf))
    data = round_to_e4m3(values * expand(inv, block, 1, values.shape))
    return data, _pack_down(fields) if packed else sf


def _pack_down(fields: torch.Tensor) -> torch.Tensor:
    """Pack exponent fields along the columns, row i in byte i % 4 of word i // 4; missing bytes are 0."""
    columns = fields.shape[1]
    padded = torch.nn.functional.pad(fields.to(torch.uint8), (0, 0, 0, -len(fields) % 4))
    bytes_of_words = padded.view(len(padded) // 4, 4, columns).transpose(1, 2)
    return bytes_of_words.flatten().view(torch.int32).view(len(padded) // 4, columns)

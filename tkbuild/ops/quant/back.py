"""Casts back from quantised formats."""

from __future__ import annotations

import torch

from tkbuild.errors import ArgumentError
from tkbuild.ops.quant.types import QuantTensor, block_of, by_format, pair_of
from tkbuild.runtime.op import kernel_op

_cast_back = kernel_op("quant.cast_back")
_BACK_DTYPES = {"bf16": "bfloat16", "fp32": "float32"}
_E2M1_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def cast_back(x: QuantTensor, fmt: str, x_block_size: tuple[int, int], x_special_fmt: str | None = None) -> torch.Tensor:
    """Return data * sf in ``fmt``, 'bf16' or 'fp32'; each sf covers a block of ``x_block_size`` rows and columns.

    The product is rounded to float32, then to ``fmt``. NaN and infinities follow from it; a ue8m0 byte b means 2**(b - 127),
    255 means NaN.

    Shapes: data (T, H), e2m1 (T, H / 2), e5m6 (T, 3 H / 2), H a multiple of 64, for e5m6 of 8; T may be 0.
    sf (ceil(T / rows), ceil(H / columns)); packed words a quarter of the columns, or, where a block has one column, a quarter of
    the rows: byte i % 4 of word [i // 4, j] is the scale of block (i, j).
    Dtypes: data float8_e4m3fn, int8 of two e2m1 (the even column in the low half), or with ``x_special_fmt`` 'e5m6' uint8 of
    eight codes in three little-endian words; sf float32, float8_e4m3fn (not with e5m6) or int32 of packed ue8m0.
    Layout: rows of data at multiples of 4 bytes, its columns contiguous; sf with any strides; the result contiguous.
    Raises: ArgumentError, NoVariantError, LaunchError.
    """
    data, sf = pair_of("quant.cast_back", x)
    if fmt not in _BACK_DTYPES:
        raise ArgumentError(f"quant.cast_back: fmt is {fmt!r}, expected 'bf16' or 'fp32'", fmt=fmt)
    if x_special_fmt not in (None, "e5m6"):
        raise ArgumentError(
            f"quant.cast_back: x_special_fmt is {x_special_fmt!r}, expected None or 'e5m6'", x_special_fmt=x_special_fmt
        )
    if (data.dtype == torch.uint8) != (x_special_fmt == "e5m6"):
        raise ArgumentError(
            f"quant.cast_back: data is {data.dtype} with x_special_fmt={x_special_fmt!r}; 'e5m6' goes with uint8 data, None with "
            "float8_e4m3fn or int8",
            x_special_fmt=x_special_fmt,
        )
    if data.dtype == torch.uint8 and sf.dtype == torch.float8_e4m3fn:
        raise ArgumentError("quant.cast_back: sf is float8_e4m3fn with x_special_fmt='e5m6', expected float32 or int32")
    rows, columns = block_of("quant.cast_back", "x_block_size", x_block_size)
    tensors = (data, *by_format("quant.cast_back", "sf", sf))
    result: torch.Tensor = _cast_back(tensors, (_BACK_DTYPES[fmt],), (rows, columns, _is_token_packed(data, sf, columns)))
    return result


def per_token_cast_back(x: QuantTensor, fmt: str, num_per_channels: int, x_special_fmt: str | None = None) -> torch.Tensor:
    """Undo ``per_token_cast``: ``cast_back`` with blocks of one row and ``num_per_channels`` columns."""
    return cast_back(x, fmt, (1, num_per_channels), x_special_fmt)


def unpack_from_e2m1fn_x2(x: torch.Tensor, out_dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return the values of packed e2m1 data (..., W), the low half of a byte first, as ``out_dtype`` (..., 2 W).

    Plain torch, for debugging.  Dtypes: x int8 or uint8.  Raises: ArgumentError for another dtype or a tensor without dimensions.
    """
    if x.dtype not in (torch.int8, torch.uint8):
        raise ArgumentError(f"quant.unpack_from_e2m1fn_x2: x is {x.dtype}, expected int8 or uint8", dtype=x.dtype)
    if x.dim() == 0:
        raise ArgumentError("quant.unpack_from_e2m1fn_x2: x has no dimensions, expected at least one")
    codes = torch.stack((x & 0xF, x >> 4 & 0xF), dim=-1).flatten(-2)
    magnitudes = torch.tensor(_E2M1_MAGNITUDES, device=x.device)
    return torch.cat((magnitudes, -magnitudes))[codes.long()].to(out_dtype)


def _is_token_packed(data: torch.Tensor, sf: torch.Tensor, columns: int) -> bool:
    """Whether words hold scales of single columns in four block rows; words of four columns are fewer."""
    if sf.dtype != torch.int32 or columns != 1 or data.dim() != 2 or sf.dim() != 2:
        return False
    width = data.shape[1]
    hidden = {torch.int8: 2 * width, torch.uint8: width // 3 * 2}.get(data.dtype, width)
    return bool(sf.shape[1] == hidden)

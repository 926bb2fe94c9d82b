"""Casts of rows in blocks of columns, contract of release 1.0."""

from __future__ import annotations

import torch

from tkbuild.errors import ArgumentError
from tkbuild.ops import quant
from tkbuild.ops.config import settings
from tkbuild.ops.quant.types import QuantTensor, check_packed
from tkbuild.runtime.op import kernel_op

_per_row_cast = kernel_op("quant.per_row_cast")
_BLOCKS = (16, 32, 64, 128)
_E5M6_CLAMP = 1e-4


def per_token_cast(
    x: torch.Tensor | QuantTensor,
    fmt: str,
    num_per_channels: int,
    x_block_size: tuple[int, int] | None = None,
    use_tma_aligned_col_major_sf: bool = False,
    round_sf: bool = False,
    use_packed_ue8m0: bool = False,
) -> QuantTensor:
    """Quantise each row in blocks of ``num_per_channels`` columns; returns (data, sf). See ``tkbuild.ops.quant``.

    A block may also be a whole row of bfloat16 or float32, and has to be for fmt 'e5m6': twelve bits, sign, 5 exponent bits and 6
    of mantissa, the greatest number 65024; clamp 1e-4. Its H is a multiple of 8; data uint8 (T, 3 H / 2), in which eight columns
    fill three little-endian words, each from its most significant bit on. Numbers below 2**-14 may be rounded one step too far in
    either direction, as release 1.0 does; NaN becomes 0x7FF.
    """
    if fmt != "e5m6" and (num_per_channels in _BLOCKS or not isinstance(x, torch.Tensor)):
        return quant.per_token_cast(
            x, fmt, num_per_channels, x_block_size, use_tma_aligned_col_major_sf, round_sf, use_packed_ue8m0
        )
    _check_row(x, fmt, num_per_channels, x_block_size, round_sf, use_packed_ue8m0)
    clamp = _E5M6_CLAMP if fmt == "e5m6" else settings.clamps[fmt, False]
    static = (fmt, "ue8m0" if use_packed_ue8m0 else "f32", use_tma_aligned_col_major_sf)
    result: QuantTensor = _per_row_cast((x,), static, (round_sf, clamp))
    return result


def _check_row(
    x: torch.Tensor | QuantTensor, fmt: str, block: int, x_block_size: tuple[int, int] | None, round_sf: bool, packed: bool
) -> None:
    name = "quant.per_token_cast"
    if fmt not in ("e4m3", "e2m1", "e5m6"):
        raise ArgumentError(f"{name}: fmt is {fmt!r}, expected 'e4m3', 'e2m1' or 'e5m6'", fmt=fmt)
    if not isinstance(x, torch.Tensor) or x_block_size is not None:
        raise ArgumentError(f"{name}: quantised input with fmt 'e5m6' or blocks of whole rows, expected bfloat16 or float32")
    if x.dim() != 2 or block != x.shape[1]:
        what = "the number of columns" if fmt == "e5m6" else "16, 32, 64, 128 or the number of columns"
        raise ArgumentError(f"{name}: num_per_channels is {block} for x of shape {tuple(x.shape)}, expected {what}")
    check_packed(name, round_sf, packed)


def per_token_cast_with_sf_only(
    x: torch.Tensor,
    fmt: str,
    num_per_channels: int,
    x_block_size: tuple[int, int] | None = None,
    use_tma_aligned_col_major_sf: bool = False,
    round_sf: bool = False,
    use_packed_ue8m0: bool = False,
) -> torch.Tensor:
    """Return the sf of ``per_token_cast`` of bfloat16 or float32 in blocks of 16 to 128 columns. See ``tkbuild.ops.quant``."""
    _refuse_quantised("per_token_cast_with_sf_only", x_block_size)
    return quant.per_token_cast_with_sf_only(x, fmt, num_per_channels, use_tma_aligned_col_major_sf, round_sf, use_packed_ue8m0)


def per_token_cast_with_precomputed_sf(
    x: torch.Tensor,
    fmt: str,
    num_per_channels: int,
    sf: torch.Tensor,
    x_block_size: tuple[int, int] | None = None,
    use_tma_aligned_col_major_sf: bool = False,
    round_sf: bool = False,
    use_packed_ue8m0: bool = False,
) -> torch.Tensor:
    """Return the data of x * (1 / sf). See ``tkbuild.ops.quant``.

    sf float32 with any strides, whatever ``use_tma_aligned_col_major_sf`` and ``round_sf`` say. Raises: ArgumentError for
    ``use_packed_ue8m0``, and as there.
    """
    _refuse_quantised("per_token_cast_with_precomputed_sf", x_block_size)
    if use_packed_ue8m0:
        raise ArgumentError("quant.per_token_cast_with_precomputed_sf: use_packed_ue8m0=True, expected float32 scales")
    return quant.per_token_cast_with_precomputed_sf(x, fmt, num_per_channels, sf)


def _refuse_quantised(function: str, x_block_size: tuple[int, int] | None) -> None:
    if x_block_size is not None:
        raise ArgumentError(f"quant.{function}: x_block_size is {x_block_size}, expected None: x is bfloat16 or float32 here")

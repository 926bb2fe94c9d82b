"""Casts of rows in blocks of columns."""

from __future__ import annotations

import torch

from tkbuild.errors import ArgumentError
from tkbuild.ops.config import settings
from tkbuild.ops.quant.types import LARGEST, QuantTensor, block_of, by_format, check_packed, pair_of
from tkbuild.runtime.op import kernel_op

_per_token_cast = kernel_op("quant.per_token_cast")
_stochastic_cast = kernel_op("quant.per_token_cast_stochastic")
_recast = kernel_op("quant.per_token_recast")
_with_sf_only = kernel_op("quant.per_token_cast_with_sf_only")
_with_precomputed_sf = kernel_op("quant.per_token_cast_with_precomputed_sf")
_cast_and_cast_back = kernel_op("quant.per_token_cast_and_cast_back")

_PRECOMPUTED_FORMATS = (torch.float32, torch.float8_e4m3fn)


def per_token_cast(
    x: torch.Tensor | QuantTensor,
    fmt: str,
    num_per_channels: int,
    x_block_size: tuple[int, int] | None = None,
    use_tma_aligned_col_major_sf: bool = False,
    round_sf: bool = False,
    use_packed_ue8m0: bool = False,
    use_e4m3_sf: bool = False,
    stochastic_cast: bool = False,
    out: QuantTensor | None = None,
) -> QuantTensor:
    """Quantise each row in blocks of ``num_per_channels`` columns; returns (data, sf), written to ``out`` if given.

    sf = a / 448, or a / 6 for 'e2m1', where a = max(abs-max of the block, clamp); the clamp is 1e-4 and 6 * 2**-126, with
    ``use_e4m3_sf`` 0.875 and 6 * 2**-9, unless ``set_amax_clamp_for_quant`` changed it. With ``round_sf`` sf is the next power of
    two, which ``use_packed_ue8m0`` stores as four exponent bytes to an int32, the first block in the lowest byte; with
    ``use_e4m3_sf`` it is rounded to e4m3, saturating and at least 2**-9. Elements are multiplied by 448 / a (6 / a), with rounded
    scales of either kind by 1 / sf. NaN elements become NaN, in e2m1 +6, and
    do not enter the abs-max. An infinite element makes the scale of its own block infinite (byte 255): finite ones there become
    0, infinite ones NaN; e4m3 scales treat it as a large number. An all-zero block gives zeros and the clamp's scale. Bytes of a
    packed word behind the last block are 0.

    x may be quantised data with scales of blocks of ``x_block_size`` rows and columns. What is quantised then are the products of
    data and scale; the factor of an element is the product of its scale and 448 / a, rounded.

    stochastic_cast: each product goes to one of its two neighbours in the format, so that its expected value is its own; sf does
    not change. The random bits are hashes of four neighbouring products and their column: equal rows give equal results on one
    arch. On sm_90a these are those of the reference; sm_100a rounds by instructions which use the same bits in a way of their own.
    x is then bfloat16 or float32.

    Shapes: x (T, H), H a multiple of 64 -> data (T, H), 'e2m1' (T, H / 2) with the even column in the low half of a byte; sf
    (T, ceil(H / b)), packed (T, ceil(H / b / 4)); T may be 0. Blocks: b 16, 32, 64 or 128; those of x powers of two, at least 16
    columns.
    Dtypes: x bfloat16 or float32, or a pair of float8_e4m3fn or int8 data and float32, packed int32 or float8_e4m3fn scales; fmt
    'e4m3' or 'e2m1'; data float8_e4m3fn or int8; sf float32, int32 or float8_e4m3fn.
    Layout: rows of x at multiples of 16 bytes, of e2m1 data 8; scales of x any strides; sf row-major, or with
    ``use_tma_aligned_col_major_sf`` column by column, each a multiple of 16 bytes.
    Raises: ArgumentError, NoVariantError, LaunchError.
    """
    _check(per_token_cast, fmt, round_sf, use_packed_ue8m0, use_e4m3_sf)
    static = (fmt, "e4m3" if use_e4m3_sf else "ue8m0" if use_packed_ue8m0 else "f32", use_tma_aligned_col_major_sf)
    scalars = (num_per_channels, round_sf, settings.clamps[fmt, use_e4m3_sf])
    if isinstance(x, torch.Tensor) and x_block_size is None:
        cast = _stochastic_cast if stochastic_cast else _per_token_cast
        result: QuantTensor = cast((x,), static, scalars, out)
    elif isinstance(x, torch.Tensor) or x_block_size is None:
        raise ArgumentError(
            f"quant.per_token_cast: x is a {type(x).__name__} with x_block_size={x_block_size!r}, expected a tensor with None, or a pair "
            "(data, sf) with (rows, columns)"
        )
    elif stochastic_cast:
        raise ArgumentError("quant.per_token_cast: quantised input with stochastic_cast=True, expected bfloat16 or float32")
    else:
        data, x_sf = pair_of("quant.per_token_cast", x)
        x_block = block_of("quant.per_token_cast", "x_block_size", x_block_size)
        result = _recast((data, *by_format("quant.per_token_cast", "x_sf", x_sf)), static, (*x_block, *scalars), out)
    return result


def per_token_cast_with_sf_only(
    x: torch.Tensor,
    fmt: str,
    num_per_channels: int,
    use_tma_aligned_col_major_sf: bool = False,
    round_sf: bool = False,
    use_packed_ue8m0: bool = False,
    use_e4m3_sf: bool = False,
    out_sf: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the sf of ``per_token_cast``, written to ``out_sf`` if given; the data are not made.

    x bfloat16 or float32. ``out_sf`` keeps the strides it has, so that ``use_tma_aligned_col_major_sf`` must be False with it.
    Raises: ArgumentError, NoVariantError, LaunchError.
    """
    _check(per_token_cast_with_sf_only, fmt, round_sf, use_packed_ue8m0, use_e4m3_sf)
    if out_sf is not None and use_tma_aligned_col_major_sf:
        raise ArgumentError(
            "quant.per_token_cast_with_sf_only: out_sf with use_tma_aligned_col_major_sf=True, expected False: given scales are row-major"
        )
    static = ("e4m3" if use_e4m3_sf else "ue8m0" if use_packed_ue8m0 else "f32", use_tma_aligned_col_major_sf)
    scalars = (num_per_channels, round_sf, settings.clamps[fmt, use_e4m3_sf], LARGEST[fmt])
    result: torch.Tensor = _with_sf_only((x,), static, scalars, None if out_sf is None else (out_sf,))
    return result


def per_token_cast_with_precomputed_sf(
    x: torch.Tensor,
    fmt: str,
    num_per_channels: int,
    sf: torch.Tensor,
    use_tma_aligned_col_major_sf: bool = False,
    round_sf: bool = False,
    use_packed_ue8m0: bool = False,
    use_e4m3_sf: bool = False,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the data of x * (1 / sf), written to ``out`` if given, where each sf covers ``num_per_channels`` columns of a row.

    Each operation rounds once to float32; the format saturates. No clamp, whatever sf is: NaN becomes NaN, in e2m1 +6. For powers
    of two and e4m3 numbers the data are those of ``per_token_cast``; otherwise its factor is 448 / abs-max, which may differ from
    1 / sf.

    Shapes, dtypes and layouts as in ``per_token_cast``; x bfloat16 or float32; sf (T, ceil(H / b)) float32, with ``use_e4m3_sf``
    float8_e4m3fn, any strides, so that ``use_tma_aligned_col_major_sf`` and ``use_packed_ue8m0`` must be False; ``round_sf`` says
    nothing about a given sf.  Raises: ArgumentError, NoVariantError, LaunchError.
    """
    _check(per_token_cast_with_precomputed_sf, fmt, False, False, use_e4m3_sf)
    if use_tma_aligned_col_major_sf or use_packed_ue8m0:
        raise ArgumentError(
            "quant.per_token_cast_with_precomputed_sf: use_tma_aligned_col_major_sf and use_packed_ue8m0 say how new scales are "
            "stored, expected both False: sf has the strides it comes with"
        )
    given = by_format("quant.per_token_cast_with_precomputed_sf", "sf", sf, _PRECOMPUTED_FORMATS)
    if use_e4m3_sf != (sf.dtype == torch.float8_e4m3fn):
        raise ArgumentError(
            f"quant.per_token_cast_with_precomputed_sf: sf is {sf.dtype} with use_e4m3_sf={use_e4m3_sf}, "
            "expected float32, or float8_e4m3fn with use_e4m3_sf=True"
        )
    result: torch.Tensor = _with_precomputed_sf((x, *given), (fmt,), (num_per_channels,), None if out is None else (out,))
    return result


def per_token_cast_and_cast_back(
    x: torch.Tensor, fmt: str, num_per_channels: int, round_sf: bool = False, use_e4m3_sf: bool = False
) -> None:
    """Replace x by what ``per_token_cast`` and a cast back to its dtype would make of it.

    Shapes: x (T, H), H a multiple of 64 and of the block: 16, 32, 64 or 128. Dtypes: x bfloat16 or float32; fmt 'e4m3' or 'e2m1'.
    Layout: rows of x at multiples of 16 bytes. NaN results have all bits of exponent and mantissa set and no sign; a block with an
    infinite element becomes NaN, in e2m1 infinite where it was. Raises: ArgumentError, NoVariantError, LaunchError.
    """
    _check(per_token_cast_and_cast_back, fmt, round_sf, False, use_e4m3_sf)
    _cast_and_cast_back((x,), (fmt,), (num_per_channels, round_sf, use_e4m3_sf, settings.clamps[fmt, use_e4m3_sf]))


def _check(function: object, fmt: str, round_sf: bool, packed: bool, e4m3_sf: bool) -> None:
    name = f"quant.{getattr(function, '__name__', function)}"
    if fmt not in LARGEST:
        raise ArgumentError(f"{name}: fmt is {fmt!r}, expected 'e4m3' or 'e2m1'", fmt=fmt)
    if e4m3_sf and (round_sf or packed):
        raise ArgumentError(f"{name}: use_e4m3_sf with round_sf or use_packed_ue8m0, expected one kind of scales")
    check_packed(name, round_sf, packed)

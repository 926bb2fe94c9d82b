"""Casts in blocks of rows and columns."""

from __future__ import annotations

import torch

from tkbuild.errors import ArgumentError
from tkbuild.ops.config import settings
from tkbuild.ops.quant.types import LARGEST, QuantTensor, block_of, by_format, check_packed, pair_of
from tkbuild.runtime.op import kernel_op

_per_block_cast = kernel_op("quant.per_block_cast")
_with_sf_only = kernel_op("quant.per_block_cast_with_sf_only")
_with_precomputed_sf = kernel_op("quant.per_block_cast_with_precomputed_sf")
_lossless = kernel_op("quant.per_block_cast_lossless")

_LOSSLESS_FORMATS = (torch.float32, torch.int32)


def per_block_cast(
    x: torch.Tensor,
    fmt: str,
    block_size: tuple[int, int],
    use_tma_aligned_col_major_sf: bool = False,
    round_sf: bool = False,
    use_packed_ue8m0: bool = False,
    out: QuantTensor | None = None,
) -> QuantTensor:
    """Quantise in blocks of ``block_size`` rows and columns; returns (data, sf), written to ``out`` if given.

    sf = max(abs-max of the block, clamp) / 448, or 6 for 'e2m1'; with ``round_sf`` the next power of two, which
    ``use_packed_ue8m0`` stores as four exponent bytes to an int32. Blocks at the edges may be short: release 2.1 asked for
    multiples of 128, this takes any number of rows. NaN elements become NaN, in e2m1 +6, and do not enter the abs-max. An
    infinite element makes the scale of its own block infinite (byte 255): finite ones there become 0, infinite ones NaN. An
    all-zero block gives zeros and the clamp's scale. Bytes of a packed word behind the last block are 0.

    Shapes: x (T, H), H a multiple of 64; blocks 32 or 128 by 32 or 128 -> data (T, H), 'e2m1' (T, H / 2) with the even column in
    the low half of a byte; sf (ceil(T / bm), ceil(H / bk)), packed (.., ceil(H / bk / 4)); T may be 0.
    Dtypes: x bfloat16 or float32; fmt 'e4m3' or 'e2m1'; data float8_e4m3fn or int8; sf float32 or int32.
    Layout: x any row stride that keeps 16-byte alignment; sf row-major, or with ``use_tma_aligned_col_major_sf`` strides
    (1, rows rounded up to 4); a given sf keeps the strides it has.  Raises: ArgumentError, NoVariantError, LaunchError.
    """
    static, scalars = _how("per_block_cast", fmt, block_size, use_tma_aligned_col_major_sf, round_sf, use_packed_ue8m0)
    result: QuantTensor = _per_block_cast((x,), (fmt, *static), scalars, out)
    return result


def per_block_cast_with_sf_only(
    x: torch.Tensor,
    fmt: str,
    block_size: tuple[int, int],
    use_tma_aligned_col_major_sf: bool = False,
    round_sf: bool = False,
    use_packed_ue8m0: bool = False,
    out_sf: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the sf of ``per_block_cast``, written to ``out_sf`` if given, with the strides it has; the data are not made.

    Shapes, dtypes and errors as there.
    """
    static, scalars = _how("per_block_cast_with_sf_only", fmt, block_size, use_tma_aligned_col_major_sf, round_sf, use_packed_ue8m0)
    result: torch.Tensor = _with_sf_only((x,), static, (*scalars, LARGEST[fmt]), None if out_sf is None else (out_sf,))
    return result


def per_block_cast_with_precomputed_sf(
    x: torch.Tensor,
    fmt: str,
    block_size: tuple[int, int],
    sf: torch.Tensor,
    use_tma_aligned_col_major_sf: bool = False,
    round_sf: bool = False,
    use_packed_ue8m0: bool = False,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the data of x * (1 / sf), written to ``out`` if given, where each sf covers a block of ``block_size``.

    Each operation rounds once to float32; the format saturates. No clamp, whatever sf is: NaN becomes NaN, in e2m1 +6. For
    powers of two the data are those of ``per_block_cast``; otherwise its factor is 448 / abs-max, which may differ from 1 / sf.

    Shapes, dtypes and layouts as in ``per_block_cast``; sf float32 (ceil(T / bm), ceil(H / bk)), any strides, so that
    ``use_tma_aligned_col_major_sf`` and ``use_packed_ue8m0`` must be False; ``round_sf`` says nothing about a given sf.
    Raises: ArgumentError, NoVariantError, LaunchError.
    """
    _check("per_block_cast_with_precomputed_sf", fmt, round_sf=True, packed=False)
    if use_tma_aligned_col_major_sf or use_packed_ue8m0:
        raise ArgumentError(
            "quant.per_block_cast_with_precomputed_sf: use_tma_aligned_col_major_sf and use_packed_ue8m0 say how new scales are "
            "stored, expected both False: sf is float32 and has the strides it comes with"
        )
    result: torch.Tensor = _with_precomputed_sf(
        (x, sf),
        (fmt,),
        block_of("quant.per_block_cast_with_precomputed_sf", "block_size", block_size),
        None if out is None else (out,),
    )
    return result


def per_block_cast_lossless(
    x: QuantTensor,
    fmt: str,
    x_block_size: tuple[int, int],
    out_block_size: tuple[int, int],
    use_tma_aligned_col_major_sf: bool = False,
    round_sf: bool = False,
    use_packed_ue8m0: bool = False,
) -> QuantTensor:
    """Turn e2m1 data whose scales are powers of two into e4m3 data of larger blocks without changing a value.

    The new scale is the largest of its block, over 64; data take up the difference, which e4m3 holds while the scales of a
    block differ by at most 2**14. What is further below the largest is rounded to nearest even, in the end to 0. Of a scale
    only the exponent counts: signs and mantissas of float32 scales are ignored, 0 and subnormal numbers stand for 2**-127, and
    where one is infinite or NaN (byte 255), so is the new one. A new exponent field below 0 becomes 0: as float32 that is the
    number 0. Scales are powers of two whatever ``round_sf`` says. Bytes of a packed word behind the last block are 0.

    Shapes: x (T, W) and scales for blocks of ``x_block_size``, W a multiple of 16 -> data (T, 2 W), sf for ``out_block_size``.
    Rows of new blocks are a multiple of those of old ones; columns are powers of two from 16 on; both at most 32768.
    Dtypes: x int8, two columns in a byte, with float32 or packed int32 scales; fmt 'e4m3'; sf float32 or int32.
    Layout: x rows at multiples of 8 bytes; scales of x any strides; sf as in ``per_block_cast``.
    Raises: ArgumentError, NoVariantError, LaunchError.
    """
    if fmt != "e4m3":
        raise ArgumentError(f"quant.per_block_cast_lossless: fmt is {fmt!r}, expected 'e4m3'", fmt=fmt)
    static = ("ue8m0" if use_packed_ue8m0 else "f32", use_tma_aligned_col_major_sf)
    name = "quant.per_block_cast_lossless"
    blocks = (*block_of(name, "x_block_size", x_block_size), *block_of(name, "out_block_size", out_block_size))
    data, x_sf = pair_of(name, x)
    result: QuantTensor = _lossless((data, *by_format(name, "x_sf", x_sf, _LOSSLESS_FORMATS)), static, blocks)
    return result


def _how(
    function: str, fmt: str, block_size: tuple[int, int], col_major: bool, round_sf: bool, packed: bool
) -> tuple[tuple[str, bool], tuple[int, int, bool, float]]:
    """Return the static values and the scalars that both kernels with new scales take."""
    _check(function, fmt, round_sf=round_sf, packed=packed)
    bm, bk = block_of(f"quant.{function}", "block_size", block_size)
    return ("ue8m0" if packed else "f32", col_major), (bm, bk, round_sf, settings.clamps[fmt, False])


def _check(function: str, fmt: str, *, round_sf: bool, packed: bool) -> None:
    if fmt not in LARGEST:
        raise ArgumentError(f"quant.{function}: fmt is {fmt!r}, expected 'e4m3' or 'e2m1'", fmt=fmt)
    check_packed(f"quant.{function}", round_sf, packed)

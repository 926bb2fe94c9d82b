"""Casts of rows in blocks of columns."""

from __future__ import annotations

import torch

from tkbuild.errors import ArgumentError, NoVariantError
from tkbuild.ops.config import settings
from tkbuild.ops.quant.types import QuantTensor
from tkbuild.runtime.op import kernel_op

_per_token_cast = kernel_op("quant.per_token_cast")
_E4M3_F32 = ("e4m3", False)


def per_token_cast(
    x: torch.Tensor,
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
    """Quantise each row in blocks of ``num_per_channels`` columns; returns (data, sf).

    sf = max(abs-max of the block, clamp) / 448; with ``round_sf`` the next power of two, which ``use_packed_ue8m0``
    stores as four exponent bytes to an int32. NaN elements stay NaN and do not enter the abs-max; an all-zero block
    gives zeros and the clamp's scale. Bytes of a packed word behind the last block are 0.

    Shapes: x (T, H), H a multiple of 64 -> data (T, H), sf (T, ceil(H / b)), packed (T, ceil(H / b / 4)); T may be 0.
    Dtypes: x bfloat16 or float32; fmt 'e4m3'; data float8_e4m3fn; sf float32 or int32.
    Layout: x any row stride that keeps 16-byte alignment; sf row-major, or with ``use_tma_aligned_col_major_sf`` strides
    (1, T rounded up to 4). Blocks: 32, 64, 128.
    Raises: ArgumentError; NoVariantError for what this release does not build: other formats and blocks, quantised input,
    e4m3 scales, stochastic rounding.
    """
    if fmt != "e4m3" or x_block_size is not None or use_e4m3_sf or stochastic_cast:
        raise _not_built(fmt, x_block_size, use_e4m3_sf, stochastic_cast)
    if use_packed_ue8m0 and not round_sf:
        raise ArgumentError("quant.per_token_cast: use_packed_ue8m0 needs round_sf=True: packed scales are powers of two")
    static = (num_per_channels, "ue8m0" if use_packed_ue8m0 else "f32", use_tma_aligned_col_major_sf)
    result: QuantTensor = _per_token_cast((x,), static, (round_sf, settings.clamps[_E4M3_F32]), out)
    return result


def _not_built(fmt: str, x_block_size: tuple[int, int] | None, use_e4m3_sf: bool, stochastic_cast: bool) -> Exception:
    asked = [
        f"fmt={fmt!r}" if fmt != "e4m3" else "",
        "quantised input" if x_block_size is not None else "",
        "use_e4m3_sf=True" if use_e4m3_sf else "",
        "stochastic_cast=True" if stochastic_cast else "",
    ]
    return NoVariantError(
        f"quant.per_token_cast: no variant is built for {', '.join(filter(None, asked))}; built: bfloat16 or float32 input, "
        "fmt='e4m3', float32 or packed ue8m0 scales; an axis value in kernel_specs/quant/per_token_cast.yaml adds one",
        kernel="quant.per_token_cast",
    )

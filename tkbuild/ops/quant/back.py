"""Casts back from quantised formats."""

from __future__ import annotations

import torch

from tkbuild.errors import ArgumentError, NoVariantError
from tkbuild.ops.quant.types import QuantTensor
from tkbuild.runtime.op import kernel_op

_cast_back = kernel_op("quant.cast_back")
_BACK_DTYPES = {"bf16": "bfloat16", "fp32": "float32"}


def cast_back(x: QuantTensor, fmt: str, x_block_size: tuple[int, int], x_special_fmt: str | None = None) -> torch.Tensor:
    """Return data * sf in ``fmt``, 'bf16' or 'fp32'; each sf covers a block of ``x_block_size`` rows and columns.

    Shapes: data (T, H), H a multiple of 64; sf (ceil(T / rows), ceil(H / columns)), packed words a quarter of the columns.
    Dtypes: data float8_e4m3fn; sf float32, or int32 of packed ue8m0 (byte b means 2**(b - 127), 255 means NaN).
    Layout: sf with any strides.  Raises: ArgumentError; NoVariantError for formats this release does not build.
    """
    data, sf = x
    if fmt not in _BACK_DTYPES:
        raise ArgumentError(f"quant.cast_back: fmt is {fmt!r}, expected 'bf16' or 'fp32'", fmt=fmt)
    if x_special_fmt is not None:
        raise NoVariantError(
            f"quant.cast_back: x_special_fmt={x_special_fmt!r} is not built; built: float8_e4m3fn data", kernel="quant.cast_back"
        )
    result: torch.Tensor = _cast_back((data, sf), (_BACK_DTYPES[fmt],), x_block_size)
    return result


def per_token_cast_back(x: QuantTensor, fmt: str, num_per_channels: int, x_special_fmt: str | None = None) -> torch.Tensor:
    """Undo ``per_token_cast``: ``cast_back`` with blocks of one row and ``num_per_channels`` columns."""
    return cast_back(x, fmt, (1, num_per_channels), x_special_fmt)

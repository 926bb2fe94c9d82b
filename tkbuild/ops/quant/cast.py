"""Element-wise casts."""

from __future__ import annotations

import torch

from tkbuild.errors import ArgumentError
from tkbuild.runtime.op import kernel_op

_cast = kernel_op("quant.cast")
_cast_stochastic = kernel_op("quant.cast_stochastic")
_NAMES = {
    torch.float32: "float32",
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
    torch.float8_e4m3fn: "float8_e4m3fn",
}
_STOCHASTIC = {("float32", "bfloat16"), ("float32", "float8_e4m3fn"), ("bfloat16", "float8_e4m3fn")}
_QUAD = 4


def cast(x: torch.Tensor, dtype: torch.dtype, stochastic_rounding: bool = False) -> torch.Tensor:
    """Return ``x`` converted to ``dtype`` element by element, to the nearest value, ties to even.

    To e4m3 values saturate at +-448 and NaN becomes 0x7F; elsewhere NaN stays NaN and infinities stay. The cast to x's own dtype
    is a copy.

    stochastic_rounding: each value goes to one of its two neighbours, so that its expected value is its own. The random bits are
    hashes of four neighbouring values and their place: equal inputs give equal results on one arch. On sm_90a the results
    are those of the reference; sm_100a rounds by instructions which use the same bits in a way of their own.

    Shapes: any; with stochastic rounding the number of elements is a multiple of 4. x may be empty.
    Dtypes: float32, bfloat16, float16, float8_e4m3fn; stochastic: float32 to bfloat16 or e4m3, bfloat16 to e4m3.
    Layout: x contiguous; aligned to 16 bytes it is converted several times as fast.
    Raises: ArgumentError, NoVariantError, LaunchError.
    """
    if not x.is_contiguous():
        raise ArgumentError(f"quant.cast: x has strides {x.stride()} for shape {tuple(x.shape)}, expected a contiguous tensor")
    if x.dtype not in _NAMES or dtype not in _NAMES:
        raise ArgumentError(f"quant.cast: {x.dtype} to {dtype}, expected two of {', '.join(_NAMES.values())}", dtype=dtype)
    if stochastic_rounding:
        _check_stochastic(x, _NAMES[dtype])
    elif x.dtype == dtype:
        return x.clone()
    op = _cast_stochastic if stochastic_rounding else _cast
    result: torch.Tensor = op((x.view(-1),), (_NAMES[dtype],))
    return result.view(x.shape)


def _check_stochastic(x: torch.Tensor, dtype: str) -> None:
    if (_NAMES[x.dtype], dtype) not in _STOCHASTIC:
        allowed = ", ".join(f"{a} to {b}" for a, b in sorted(_STOCHASTIC))
        raise ArgumentError(f"quant.cast: stochastic rounding of {x.dtype} to {dtype}, expected {allowed}", dtype=dtype)
    if x.numel() % _QUAD:
        raise ArgumentError(f"quant.cast: stochastic rounding of {x.numel()} elements, expected a multiple of {_QUAD}")

"""Casts of columns in blocks of rows."""

from __future__ import annotations

import torch

from tkbuild.errors import ArgumentError
from tkbuild.ops.config import settings
from tkbuild.ops.quant.types import QuantTensor, check_packed
from tkbuild.runtime.op import kernel_op

_per_channel_cast = kernel_op("quant.per_channel_cast")
_quantised = kernel_op("quant.per_channel_cast_quantised")


def per_channel_cast(
    x: torch.Tensor | QuantTensor,
    fmt: str,
    num_per_tokens: int,
    round_sf: bool = False,
    num_per_channels: int | None = None,
    use_packed_ue8m0: bool = False,
) -> QuantTensor:
    """Quantise each column in blocks of ``num_per_tokens`` rows; returns (data, sf).

    x may be quantised: (data, sf) with a scale for each ``num_per_channels`` columns of a row; their product, rounded to float32,
    is what is quantised. sf = max(abs-max of the block, clamp) / 448; with ``round_sf`` the next power of two, which
    ``use_packed_ue8m0`` stores as exponent bytes of four blocks one under the other to an int32; bytes behind the last block
    are 0. The last block may be short: release 2.1 asked for multiples of 128, this takes any number of rows. NaN elements stay
    NaN and do not enter the abs-max. An infinite element makes the scale of its own block infinite (byte 255): finite ones
    there become 0, infinite ones NaN. An all-zero block gives zeros and the clamp's scale.

    Shapes: x (T, H), H a multiple of 64; num_per_tokens 32 or 128 -> data (T, H), sf (ceil(T / b), H), packed
    (ceil(T / b / 4), H); T may be 0. Scales of x (T, ceil(H / num_per_channels)), packed (.., ceil(H / num_per_channels / 4)).
    Dtypes: x bfloat16, float32, or float8_e4m3fn with float32, packed int32 or float8_e4m3fn scales; fmt 'e4m3'; data
    float8_e4m3fn; sf float32 or int32.
    Layout: x any row stride that keeps 16-byte alignment (8 for float8_e4m3fn); its scales any strides; results contiguous.
    Raises: ArgumentError, NoVariantError, LaunchError.
    """
    return cast_channels("per_channel_cast", x, fmt, num_per_tokens, round_sf, num_per_channels, use_packed_ue8m0)


def cast_channels(
    function: str,
    x: torch.Tensor | QuantTensor,
    fmt: str,
    num_per_tokens: int,
    round_sf: bool,
    num_per_channels: int | None,
    use_packed_ue8m0: bool = False,
    pos_to_token: torch.Tensor | None = None,
) -> QuantTensor:
    """``per_channel_cast`` under the name ``function``, of the rows that ``pos_to_token`` names if given."""
    check_format(function, fmt)
    check_packed(f"quant.{function}", round_sf, use_packed_ue8m0)
    static = ("ue8m0" if use_packed_ue8m0 else "f32",)
    data = x if isinstance(x, torch.Tensor) else x[0]
    if data.dim() != 2 or (pos_to_token is not None and pos_to_token.dim() != 1):
        raise ArgumentError(f"quant.{function}: x has {data.dim()} dimensions, expected x (T, H) and pos_to_token (N,)")
    rows = data.shape[0] if pos_to_token is None else pos_to_token.shape[0]
    scalars = (rows, num_per_tokens, round_sf, settings.clamps["e4m3", False])
    result: QuantTensor
    if isinstance(x, torch.Tensor):
        result = _per_channel_cast((x, pos_to_token), static, scalars)
        return result
    if num_per_channels is None:
        raise ArgumentError(f"quant.{function}: quantised input needs num_per_channels: the columns that share a scale of it")
    result = _quantised((*x, pos_to_token), static, (num_per_channels, *scalars))
    return result


def check_format(function: str, fmt: str) -> None:
    """Raises: ArgumentError unless ``fmt`` is 'e4m3', the one format of these functions."""
    if fmt != "e4m3":
        raise ArgumentError(f"quant.{function}: fmt is {fmt!r}, expected 'e4m3'", fmt=fmt)

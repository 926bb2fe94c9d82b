"""Casts of columns in blocks of rows, contract of release 1.0."""

from __future__ import annotations

import torch

from tkbuild.ops.config import settings
from tkbuild.ops.quant.per_channel import cast_channels, check_format
from tkbuild.ops.quant.types import QuantTensor
from tkbuild.runtime.op import kernel_op

_and_transpose = kernel_op("quant.per_channel_cast_and_transpose")


def per_channel_cast_fused(
    x: torch.Tensor | QuantTensor,
    fmt: str,
    num_per_tokens: int = 128,
    round_sf: bool = False,
    num_per_channels: int | None = None,
    pos_to_token: torch.Tensor | None = None,
) -> QuantTensor:
    """``per_channel_cast`` of x, or of the rows of x that ``pos_to_token`` names.

    A number that is no row of x, such as -1, gives a row of zeros. The last block may be short: release 1.0 asked for
    multiples of 128 rows, or 16 with ``pos_to_token``, this takes any number.

    Shapes: x (T, H), or (data, sf) with sf (T, ceil(H / num_per_channels)); pos_to_token (N,) -> data (N, H), sf (ceil(N / b), H),
    with N = T where there is no pos_to_token; both may be 0.
    Dtypes: pos_to_token int32; else, and for layouts, NaN and infinities, as in ``tkbuild.ops.quant.per_channel_cast``.
    Raises: ArgumentError, NoVariantError, LaunchError.
    """
    if pos_to_token is not None and (x if isinstance(x, torch.Tensor) else x[0]).shape[0] == 0:
        x = _one_row(x)
    return cast_channels("per_channel_cast_fused", x, fmt, num_per_tokens, round_sf, num_per_channels, pos_to_token=pos_to_token)


def per_channel_cast_and_transpose(x: torch.Tensor, fmt: str, num_per_tokens: int, round_sf: bool = False) -> QuantTensor:
    """``per_channel_cast`` with the data transposed; returns (data, sf).

    Shapes: x (T, H), T a multiple of 16, H of 64; num_per_tokens 32 or 128 -> data (H, T), sf (ceil(T / num_per_tokens), H), not
    transposed; T may be 0.
    Dtypes: x bfloat16; fmt 'e4m3'; data float8_e4m3fn; sf float32.  Layout: x any row stride of whole 16 bytes; results
    contiguous. NaN, infinities and zeros as in ``tkbuild.ops.quant.per_channel_cast``.
    Raises: ArgumentError, NoVariantError, LaunchError.
    """
    check_format("per_channel_cast_and_transpose", fmt)
    result: QuantTensor = _and_transpose((x,), (), (num_per_tokens, round_sf, settings.clamps["e4m3", False]))
    return result


def _one_row(x: torch.Tensor | QuantTensor) -> torch.Tensor | QuantTensor:
    """Return a row of zeros for an empty x, which has no memory that a kernel could be given."""
    if isinstance(x, torch.Tensor):
        return torch.zeros((1, x.shape[1]), dtype=x.dtype, device=x.device)
    data, sf = (torch.zeros((1, tensor.shape[1]), dtype=torch.uint8, device=tensor.device).to(tensor.dtype) for tensor in x)
    return data, sf

"""Transposes of the last two axes."""

from __future__ import annotations

import torch

from tkbuild.runtime.op import kernel_op

__all__ = ["batched_transpose", "transpose"]

_transpose = kernel_op("transpose.transpose")
_batched_transpose = kernel_op("transpose.batched_transpose")


def transpose(x: torch.Tensor) -> torch.Tensor:
    """Return the transpose of a matrix as a contiguous tensor.

    Shapes: x (M, N) -> (N, M); empty is allowed.  Dtypes: float8_e4m3fn, bfloat16, float32.
    Layout: x.stride(1) == 1, any row stride.  Runs on the current stream of x's device.
    Raises: ArgumentError, NoVariantError, LaunchError.
    """
    result: torch.Tensor = _transpose((x,))
    return result


def batched_transpose(x: torch.Tensor) -> torch.Tensor:
    """Return the transpose of each matrix of a batch as a contiguous tensor.

    Shapes: x (B, M, N) -> (B, N, M); empty is allowed.  Dtypes: float8_e4m3fn, bfloat16, float32.
    Layout: x.stride(2) == 1, any batch and row stride.  Runs on the current stream of x's device.
    Raises: ArgumentError, NoVariantError, LaunchError.
    """
    result: torch.Tensor = _batched_transpose((x,))
    return result

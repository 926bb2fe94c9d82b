"""References of the transposition kernels."""

from __future__ import annotations

import torch


def transpose(x: torch.Tensor) -> torch.Tensor:
    """Return the transpose of ``x`` as a contiguous tensor.

    Shapes: x (M, N), any strides; result (N, M).  Dtypes: any; the bits are copied.
    """
    return x.transpose(-2, -1).contiguous()


def batched_transpose(x: torch.Tensor) -> torch.Tensor:
    """Return ``x`` with its last two axes exchanged, as a contiguous tensor.

    Shapes: x (B, M, N), any strides; result (B, N, M).  Dtypes: any; the bits are copied.
    """
    return x.transpose(-2, -1).contiguous()

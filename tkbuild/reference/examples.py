"""References of the example kernels."""

from __future__ import annotations

import torch


def gemm_bf16(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return a @ b.T, accumulated in float32 and rounded once.

    Shapes: a (M, K), b (N, K) -> (M, N), contiguous.  Dtypes: bfloat16.
    """
    return (a.float() @ b.float().mT).to(torch.bfloat16)

"""The Sinkhorn normalisation."""

from __future__ import annotations

import torch

from tkbuild.runtime.op import is_traced, kernel_op

__all__ = ["mhc_sinkhorn_bwd", "mhc_sinkhorn_fwd"]

_sinkhorn = kernel_op("mhc.sinkhorn")
_sinkhorn_bwd = kernel_op("mhc.sinkhorn_bwd")


def mhc_sinkhorn_fwd(comb_res_mix: torch.Tensor, comb_res_mix_out: torch.Tensor, repeat: int, eps: float) -> None:
    """Write the Sinkhorn normalisation of each matrix: softmax of the rows, then ``repeat`` rounds of column and row sums.

    Shapes: both (..., m, m), m = 4; no matrices are allowed.  Dtypes: float32.  Layout: contiguous.
    Raises: ArgumentError, NoVariantError, LaunchError.
    """
    _sinkhorn((_matrices(comb_res_mix),), (), (repeat, eps), (_matrices(comb_res_mix_out),))


def mhc_sinkhorn_bwd(grad_output: torch.Tensor, x: torch.Tensor, grad_input: torch.Tensor, repeat: int, eps: float) -> None:
    """Write the gradient of ``mhc_sinkhorn_fwd`` with respect to its input ``x``.

    Shapes: all (..., m, m), m = 4.  Dtypes: float32.  Layout: contiguous.
    Raises: ArgumentError, NoVariantError, LaunchError.
    """
    _sinkhorn_bwd((_matrices(grad_output), _matrices(x)), (), (repeat, eps), (_matrices(grad_input),))


def _matrices(x: torch.Tensor) -> torch.Tensor:
    """View leading dimensions as one where torch traces; the launcher does it by itself."""
    return x.view(-1, *x.shape[-2:]) if x.dim() != 3 and is_traced(x) else x

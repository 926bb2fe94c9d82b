"""The norm's weight merged into the rows that the normalised residual is multiplied with."""

from __future__ import annotations

import torch

from tkbuild.runtime.op import kernel_op

__all__ = ["mhc_fn_normw_merge_bwd", "mhc_fn_normw_merge_fwd"]

_merge = kernel_op("mhc.fn_normw_merge")
_merge_bwd = kernel_op("mhc.fn_normw_merge_bwd")


def mhc_fn_normw_merge_fwd(fn: torch.Tensor, normw: torch.Tensor, out_fn: torch.Tensor) -> None:
    """Write fn[r, c] * normw[c] into ``out_fn``.

    Shapes: fn, out_fn (R, C), normw (C), C a multiple of 4.  Dtypes: float32.  Layout: contiguous.
    Raises: ArgumentError, NoVariantError, LaunchError.
    """
    _merge((fn, normw), (), (), (out_fn,))


def mhc_fn_normw_merge_bwd(
    fn: torch.Tensor,
    normw: torch.Tensor,
    out_fn_grad: torch.Tensor,
    fn_grad: torch.Tensor | None,
    normw_grad: torch.Tensor | None,
) -> None:
    """Add out_fn_grad * normw to ``fn_grad``, and the sum of out_fn_grad * fn over the rows to ``normw_grad``; None leaves one out.

    The order of the sum depends on R alone.
    Shapes: fn, out_fn_grad, fn_grad (R, C), normw, normw_grad (C), C a multiple of 4.  Dtypes: float32.  Layout: contiguous.
    Raises: ArgumentError, NoVariantError, LaunchError.
    """
    _merge_bwd((fn, normw, out_fn_grad, fn_grad, normw_grad))

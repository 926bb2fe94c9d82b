"""Copies of hidden states into residual streams."""

from __future__ import annotations

import torch

from tkbuild.ops.mhc.shapes import rows, streams, taken
from tkbuild.runtime.op import kernel_op

__all__ = ["expand_to_mhc_bwd", "expand_to_mhc_fwd"]

_expand = kernel_op("mhc.expand_to_mhc")
_expand_bwd = kernel_op("mhc.expand_to_mhc_bwd")


def expand_to_mhc_fwd(x: torch.Tensor, o: torch.Tensor) -> None:
    """Write each row of ``x`` into every stream of ``o``.

    Shapes: x (..., H), o (..., m, H), H a multiple of 8, any m; no rows are allowed.  Dtypes: bfloat16.
    Layout: o contiguous; rows of x contiguous, a multiple of 8 elements apart.
    Raises: ArgumentError, NoVariantError, LaunchError.
    """
    kernel = "mhc.expand_to_mhc"
    copies = taken(streams, kernel, "o", o)
    _expand((taken(rows, kernel, "x", x),), (), (copies.shape[-2],), (copies,))


def expand_to_mhc_bwd(o_grad: torch.Tensor, x_grad: torch.Tensor) -> None:
    """Write the sum of the streams of ``o_grad``, added in increasing order in float32 and rounded once, into ``x_grad``.

    Shapes: o_grad (..., m, H), x_grad (..., H), H a multiple of 8, any m; no rows are allowed.  Dtypes: bfloat16.
    Layout: x_grad contiguous; rows of o_grad contiguous, its other strides multiples of 8 elements.
    Raises: ArgumentError, NoVariantError, LaunchError.
    """
    kernel = "mhc.expand_to_mhc_bwd"
    _expand_bwd((taken(streams, kernel, "o_grad", o_grad),), (), (), (taken(rows, kernel, "x_grad", x_grad),))

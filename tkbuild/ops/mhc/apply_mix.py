"""A layer's input from the residual streams."""

from __future__ import annotations

import torch

from tkbuild.ops.mhc.shapes import STREAMS, like, outputs, rows, streams, taken, tokens
from tkbuild.runtime.op import kernel_op

__all__ = ["mhc_pre_apply_mix_bwd", "mhc_pre_apply_mix_fwd"]

_apply = kernel_op("mhc.pre_apply_mix")
_apply_bwd = kernel_op("mhc.pre_apply_mix_bwd")

_MIX = ((STREAMS, 1), (STREAMS,))


def mhc_pre_apply_mix_fwd(x: torch.Tensor, mix: torch.Tensor, o: torch.Tensor) -> None:
    """Write the sum of mix[i] * x[i] over the streams into ``o``: in float32 by fused multiply-adds in order, rounded once.

    Shapes: x (..., m, H), mix (..., m) or (..., m, 1), o (..., H), m = 4, H a multiple of 8; no tokens are allowed.
    Dtypes: x and o bfloat16, mix float32.  Layout: contiguous.
    Raises: ArgumentError, NoVariantError, LaunchError.
    """
    kernel = "mhc.pre_apply_mix"
    _apply((taken(streams, kernel, "x", x), taken(tokens, kernel, "mix", mix, *_MIX)), (), (), (taken(rows, kernel, "o", o),))


def mhc_pre_apply_mix_bwd(o_grad: torch.Tensor, x: torch.Tensor, mix: torch.Tensor, x_grad: torch.Tensor) -> torch.Tensor:
    """Add mix[i] * o_grad to ``x_grad``, and return the gradient of ``mix``: the sums of o_grad * x[i] over the columns.

    The sum for ``x_grad`` is taken in float32 and rounded once; the order of the other depends on H alone.
    Shapes: x_grad as x, o_grad (..., H), the others as in ``mhc_pre_apply_mix_fwd``; the result is shaped like mix.
    Dtypes: mix and result float32, the others bfloat16.  Layout: contiguous; rows of o_grad may lie multiples of 8 elements apart.
    Raises: ArgumentError, NoVariantError, LaunchError.
    """
    kernel = "mhc.pre_apply_mix_bwd"
    given = (
        taken(rows, kernel, "o_grad", o_grad),
        taken(streams, kernel, "x", x),
        taken(tokens, kernel, "mix", mix, *_MIX),
        taken(streams, kernel, "x_grad", x_grad),
    )
    mix_grad: torch.Tensor = _apply_bwd(given, (), (1,), outputs(mix))
    return like(mix_grad, mix)

"""Hidden states copied into residual streams, differentiable."""

from __future__ import annotations

from typing import Any

import torch

from tkbuild.ops.mhc.shapes import rows, streams
from tkbuild.ops.modeling.mhc.outputs import can_be_written
from tkbuild.runtime.op import kernel_op

__all__ = ["expand_from_embedding", "expand_to_mhc"]

_expand = kernel_op("mhc.expand_to_mhc")
_expand_bwd = kernel_op("mhc.expand_to_mhc_bwd")


class ExpandToMhc(torch.autograd.Function):
    """Saves nothing. ``out`` receives the streams if it is given."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, mhc_mult: int, out: torch.Tensor | None) -> torch.Tensor:
        copies: torch.Tensor = _expand(
            (hidden,), (), (mhc_mult,), None if out is None else (streams("mhc.expand_to_mhc", "out", out),)
        )
        if out is None:
            return copies
        ctx.mark_dirty(out)
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return _expand_bwd((streams("mhc.expand_to_mhc_bwd", "the gradient", grad.contiguous()),)), None, None


def expand_to_mhc(hidden: torch.Tensor, mhc_mult: int, out: torch.Tensor | None = None) -> torch.Tensor:
    """Return ``mhc_mult`` copies of each row of ``hidden``, in ``out`` if that is given.

    Differentiable once with respect to ``hidden``.
    Shapes: hidden (..., H) -> (..., mhc_mult, H), H a multiple of 8.  Dtypes: bfloat16.
    Layout: ``out`` contiguous and apart from hidden; rows of hidden contiguous, a multiple of 8 elements apart.
    Raises: ArgumentError, NoVariantError, LaunchError.
    """
    flat = rows("mhc.expand_to_mhc", "hidden", hidden)
    if out is not None and can_be_written("mhc.expand_to_mhc", out, hidden):
        result: torch.Tensor = ExpandToMhc.apply(flat, mhc_mult, out)  # type: ignore[no-untyped-call]
        return result
    copies: torch.Tensor = ExpandToMhc.apply(flat, mhc_mult, None)  # type: ignore[no-untyped-call]
    copies = copies.view(*hidden.shape[:-1], mhc_mult, hidden.shape[-1])
    return copies if out is None else out.copy_(copies)


def expand_from_embedding(x: torch.Tensor, mhc_mult: int = 4) -> torch.Tensor:
    """Return the residual streams that a model starts from: ``mhc_mult`` copies of each embedding.

    Differentiable once with respect to ``x``.
    Shapes: x (..., H) -> (..., mhc_mult, H), H a multiple of 8.  Dtypes: bfloat16.
    Raises: ArgumentError, NoVariantError, LaunchError.
    """
    return expand_to_mhc(x, mhc_mult)

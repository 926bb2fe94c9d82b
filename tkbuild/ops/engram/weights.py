"""Weights of the gate and the reduction of their gradients."""

from __future__ import annotations

import torch

from tkbuild.runtime.op import kernel_op

__all__ = ["fused_weight", "grad_w_reduce"]

_fused_weight = kernel_op("engram.fused_weight")
_grad_w_reduce = kernel_op("engram.grad_w_reduce")


def fused_weight(weight_hidden: torch.Tensor, weight_embed: torch.Tensor) -> torch.Tensor:
    """Return the element-wise product of the two gate weights, exact in float32.

    Shapes: both (hc, H) -> (hc, H).  Dtypes: bfloat16 -> float32.  Layout: contiguous.
    Raises: ArgumentError, NoVariantError, LaunchError.
    """
    result: torch.Tensor = _fused_weight((weight_hidden, weight_embed))
    return result


def grad_w_reduce(
    grad_w_partial: torch.Tensor,
    weight_hidden: torch.Tensor,
    weight_embed: torch.Tensor,
    grad_weight_hidden: torch.Tensor,
    grad_weight_embed: torch.Tensor,
) -> None:
    """Sum partial gradients of the fused weight and add them, times the other weight, to both weights' gradients.

    The sum runs over P in increasing order, so the result does not depend on the device.
    Shapes: grad_w_partial (P, hc, H), the others (hc, H).  Dtypes: weights bfloat16, the others float32.
    Layout: contiguous.  Raises: ArgumentError, NoVariantError, LaunchError.
    """
    _grad_w_reduce((grad_w_partial, weight_hidden, weight_embed, grad_weight_hidden, grad_weight_embed))

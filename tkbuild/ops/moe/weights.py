"""Normalisation of routing weights."""

from __future__ import annotations

import torch

from tkbuild.runtime.op import kernel_op

_normalize_weight = kernel_op("moe.normalize_weight")


def normalize_weight(topk_weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (denominator, topk_weights / denominator); the denominator is the sum of a row plus 1e-20.

    The sum is taken in pairs of distance 16, 8, 4, 2, 1, as in ``moe_topk_gate_forward``; NaN and infinities pass on.
    Shapes: topk_weights (T, k), k <= 32 -> (T), (T, k); T may be 0.  Dtypes: float32.  Layout: contiguous.
    Raises: ArgumentError, NoVariantError, LaunchError.
    """
    result: tuple[torch.Tensor, torch.Tensor] = _normalize_weight((topk_weights,), (), (0,))
    return result

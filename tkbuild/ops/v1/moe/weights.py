"""Normalisation of routing weights, contract of release 1.0."""

from __future__ import annotations

import torch

from tkbuild.runtime.op import kernel_op

_normalize_weight = kernel_op("moe.normalize_weight")


def normalize_weight(topk_weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (denominator, topk_weights / denominator); the denominator is 1e-20, to which each weight of a row is added in turn.

    That is the sum of ``top2_sum_gate``. See ``tkbuild.ops.moe.normalize_weight``.
    """
    result: tuple[torch.Tensor, torch.Tensor] = _normalize_weight((topk_weights,), (), (1,))
    return result

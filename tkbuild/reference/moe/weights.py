"""Reference of the normalisation of routing weights."""

from __future__ import annotations

import torch


def normalize_weight(topk_weights: torch.Tensor, *, in_order: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (denominator, topk_weights / denominator); the denominator is the sum of a row and 1e-20.

    in_order: 0: the sum in pairs of distance 16, 8, 4, 2, 1, then 1e-20; else 1e-20, to which each weight is added in turn.
    Shapes: topk_weights (T, k), k <= 32 -> (T), (T, k).  Dtypes: float32.
    """
    columns = list(topk_weights.unbind(1))
    if in_order:
        total = torch.full_like(columns[0], 1e-20)
        for column in columns:
            total = total + column
    else:
        for distance in (16, 8, 4, 2, 1):
            pairs = [j for j in range(len(columns) - distance) if j & distance == 0]
            for j in pairs:
                columns[j] = columns[j] + columns[j + distance]
        total = 1e-20 + columns[0]
    return total, topk_weights / total.view(-1, 1)

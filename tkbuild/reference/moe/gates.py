"""References of the gates."""

from __future__ import annotations

import torch


def topk_gate(scores: torch.Tensor, *, num_topk: int) -> torch.Tensor:
    """Return the indices of the ``num_topk`` largest scores of each row, largest first.

    Shapes: scores (T, E), any strides; result (T, num_topk), int64; 1 <= num_topk <= E.  Dtypes: scores float32.
    Equal scores are taken in the order of their index, and -0.0 equals 0.0. NaN ranks below every number, minus
    infinity included, and all NaN are equal. So the indices of a row are distinct and in [0, E) for any input.
    """
    is_nan = torch.isnan(scores)
    by_score = torch.sort(scores.masked_fill(is_nan, -torch.inf), dim=-1, descending=True, stable=True).indices
    nan_last = torch.sort(is_nan.gather(-1, by_score).to(torch.int8), dim=-1, stable=True).indices
    return by_score.gather(-1, nan_last)[:, :num_topk].contiguous()

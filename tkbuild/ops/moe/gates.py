"""Gates: which experts each token goes to, and with what weights."""

from __future__ import annotations

import torch

from tkbuild.errors import ArgumentError
from tkbuild.runtime.op import kernel_op

_topk_gate = kernel_op("moe.topk_gate")
_MAX_TOPK = 32


def topk_gate(scores: torch.Tensor, num_topk: int) -> torch.Tensor:
    """Return the indices of the ``num_topk`` largest scores of each row, in descending order.

    Ties go to the smaller index, as in a stable descending sort. Indices are unique and in [0, E) whatever the scores:
    NaN ranks below every number.
    Shapes: scores (T, E), 1 <= num_topk <= min(32, E) -> (T, num_topk); T may be 0.  Dtypes: float32 -> int64.
    Layout: contiguous.  Runs on the current stream of the scores' device.
    Raises: ArgumentError, NoVariantError, LaunchError.
    """
    if not 1 <= num_topk <= _MAX_TOPK:
        raise ArgumentError(f"moe.topk_gate: num_topk is {num_topk}, expected 1 to {_MAX_TOPK}", num_topk=num_topk)
    result: torch.Tensor = _topk_gate((scores,), (), (num_topk,))
    return result

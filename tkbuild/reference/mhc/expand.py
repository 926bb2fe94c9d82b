"""References of the copies of hidden states into residual streams."""

from __future__ import annotations

import torch


def expand_to_mhc(x: torch.Tensor, *, m: int) -> torch.Tensor:
    """Return each row of ``x`` in ``m`` streams.

    Shapes: x (n, H) -> (n, m, H), the same dtype.
    """
    return x[:, None].repeat(1, m, 1)


def expand_to_mhc_bwd(out_grad: torch.Tensor) -> torch.Tensor:
    """Return the sum of the streams in increasing order, in float32, rounded to the dtype of ``out_grad``.

    Shapes: out_grad (n, m, H) -> (n, H).  Dtypes: bfloat16, or float64 for checks of gradients.
    """
    streams = out_grad.unbind(dim=1)
    total = _wide(streams[0])
    for stream in streams[1:]:
        total = total + _wide(stream)
    return total.to(out_grad.dtype)


def _wide(x: torch.Tensor) -> torch.Tensor:
    return x if x.dtype == torch.float64 else x.float()

"""References of the Sinkhorn normalisation."""

from __future__ import annotations

import torch


def sinkhorn(x: torch.Tensor, *, repeat: int, eps: float) -> torch.Tensor:
    """Return each matrix of ``x`` brought near to a doubly stochastic one by alternating normalisations.

    Shapes: x and result (n, m, m).  Dtypes: float32, or float64 for checks of gradients.
    c = softmax over the last axis + eps; c = c / (column sum + eps); then ``repeat`` - 1 times rows and then columns
    in the same way. A row sum runs over the last axis, a column sum over the one before.
    """
    c = torch.softmax(x, dim=-1) + eps
    c = c / (c.sum(dim=-2, keepdim=True) + eps)
    for _ in range(repeat - 1):
        c = c / (c.sum(dim=-1, keepdim=True) + eps)
        c = c / (c.sum(dim=-2, keepdim=True) + eps)
    return c


def sinkhorn_bwd(grad_out: torch.Tensor, x: torch.Tensor, *, repeat: int, eps: float) -> torch.Tensor:
    """Return the gradient of ``x`` from that of ``sinkhorn(x)``.

    Shapes: grad_out, x and result (n, m, m).  Dtypes: all float32, or all float64.
    """
    p = torch.softmax(x, dim=-1)
    normalised, sums, dims = [p + eps], [torch.ones_like(p)], [0]
    for step in range(2 * repeat - 1):
        dim = -2 if step % 2 == 0 else -1
        sums.append(normalised[-1].sum(dim=dim, keepdim=True) + eps)
        normalised.append(normalised[-1] / sums[-1])
        dims.append(dim)
    grad = grad_out
    for y, total, dim in zip(normalised[:0:-1], sums[:0:-1], dims[:0:-1], strict=True):
        grad = (grad - (grad * y).sum(dim=dim, keepdim=True)) / total
    return (grad - (grad * p).sum(dim=-1, keepdim=True)) * p

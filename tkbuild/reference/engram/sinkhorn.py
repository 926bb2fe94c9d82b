"""References of the Sinkhorn optimiser step."""

from __future__ import annotations

import torch

from tkbuild.reference.arithmetic import fma


def sinkhorn_momentum_update(
    grad: torch.Tensor, momentum_buffer: torch.Tensor, *, beta: float, complement: float, nesterov: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the new momentum in its own dtype, and the input of the Sinkhorn steps in float32.

    momentum = fma(m, beta, complement * g) in float32; the second result is fma(g, complement, beta * momentum) with ``nesterov``,
    else the momentum, before it is rounded.  Shapes: (numel,) all.  Dtypes: grad and momentum_buffer bfloat16 or float32.
    beta and complement are rounded to float32.
    """
    g, m = grad.float(), momentum_buffer.float()
    b, c = (torch.tensor(value, dtype=torch.float32, device=g.device) for value in (beta, complement))
    momentum = fma(m, b, c * g)
    return momentum.to(momentum_buffer.dtype), fma(g, c, b * momentum) if nesterov else momentum


def sinkhorn_step(
    matrix: torch.Tensor, row_scale: torch.Tensor, col_scale: torch.Tensor, *, eps: float, num_partials: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the new row scales, the norms of the scaled rows, and partial column sums of the squares of the normalised rows.

    x = (row_scale * matrix) * col_scale; norm = sqrt(sum of squares of a row of x); f = 1 / (norm + eps); the new scale is
    row_scale * f. Row p of the last result sums (x * f) ** 2 over the rows from p * n to (p + 1) * n, n = ceil(rows / num_partials).

    Shapes: matrix (rows, D), row_scale and norms (rows), col_scale (D), partial sums (num_partials, D).  Dtypes: float32 or float64.
    """
    x = _scaled(matrix, row_scale, col_scale)
    norm = x.square().sum(-1).sqrt()
    factor = 1 / (norm + eps)
    squares = (x * factor[:, None]).square()
    missing = squares.new_zeros((-squares.shape[0] % num_partials, squares.shape[1]))
    rows = -(-squares.shape[0] // num_partials)
    partial = torch.cat((squares, missing)).view(num_partials, rows, squares.shape[1]).sum(1)
    return row_scale * factor, norm, partial


def sinkhorn_step_reduce(partial: torch.Tensor) -> torch.Tensor:
    """Return the sums of the columns, added from the first row to the last. Shapes: (P, D) -> (D).  Dtypes: float32."""
    total = torch.zeros_like(partial[0]) if len(partial) else partial.new_zeros(partial.shape[1:])
    for row in partial:
        total = total + row
    return total


def sinkhorn_finalize(
    matrix: torch.Tensor, row_scale: torch.Tensor, col_scale: torch.Tensor, *, eps: float, alpha: float
) -> torch.Tensor:
    """Return x * (alpha / (norm + eps)) with x and norm of each row as in ``sinkhorn_step``.

    Shapes: matrix and result (rows, D), row_scale (rows), col_scale (D).  Dtypes: float32 or float64.
    """
    x = _scaled(matrix, row_scale, col_scale)
    return x * (alpha / (x.square().sum(-1, keepdim=True).sqrt() + eps))


def _scaled(matrix: torch.Tensor, row_scale: torch.Tensor, col_scale: torch.Tensor) -> torch.Tensor:
    return row_scale[:, None] * matrix * col_scale

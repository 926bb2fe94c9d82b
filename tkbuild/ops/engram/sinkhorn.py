"""The Sinkhorn optimiser step."""

from __future__ import annotations

import torch

from tkbuild.errors import ArgumentError
from tkbuild.runtime import get_num_sms
from tkbuild.runtime.op import kernel_op

__all__ = ["engram_sinkhorn_finalize", "engram_sinkhorn_momentum_update", "engram_sinkhorn_step", "engram_sinkhorn_step_reduce"]

_momentum_update = kernel_op("engram.sinkhorn_momentum_update")
_step = kernel_op("engram.sinkhorn_step")
_step_reduce = kernel_op("engram.sinkhorn_step_reduce")
_finalize = kernel_op("engram.sinkhorn_finalize")
_CTAS_PER_SM = 3


def engram_sinkhorn_momentum_update(
    grad: torch.Tensor, momentum_buffer: torch.Tensor, beta1: float, nesterov: bool = True
) -> torch.Tensor:
    """Update the momentum in place, and return the input of the Sinkhorn steps.

    momentum = fma(m, beta1, (1 - beta1) * grad) in float32, stored in its own dtype; the result is that momentum before it is
    rounded, or with ``nesterov`` fma(grad, 1 - beta1, beta1 * momentum). beta1 and 1 - beta1 are rounded from float64.

    Shapes: all alike; the number of elements is a multiple of 4.  Dtypes: grad and momentum_buffer bfloat16 or float32, each;
    result float32.  Layout: contiguous.  Raises: ArgumentError, NoVariantError, LaunchError.
    """
    kernel = "engram.sinkhorn_momentum_update"
    if grad.shape != momentum_buffer.shape or not (grad.is_contiguous() and momentum_buffer.is_contiguous()):
        raise ArgumentError(
            f"{kernel}: grad and momentum_buffer have shapes {tuple(grad.shape)} and {tuple(momentum_buffer.shape)} and strides "
            f"{tuple(grad.stride())} and {tuple(momentum_buffer.stride())}, expected one shape, contiguous",
            kernel=kernel,
        )
    result: torch.Tensor = _momentum_update((grad.view(-1), momentum_buffer.view(-1)), (), (beta1, 1.0 - beta1, int(nesterov)))
    return result.view(grad.shape)


def engram_sinkhorn_step(
    matrix: torch.Tensor, row_scale: torch.Tensor, col_scale: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Divide ``row_scale``, in place, by the norms of the scaled rows; returns (row_norm, col_sumsq_partial).

    x = (row_scale * matrix) * col_scale; row_norm = sqrt(sum of squares of a row of x); f = 1 / (row_norm + eps); row_scale *= f.
    Row p of col_sumsq_partial sums (x * f) ** 2 over the p-th of P equal ranges of rows; ``engram_sinkhorn_step_reduce`` adds them up.
    P is three times the number of SMs in use; it decides the order of the sums. Without rows they are zeros.

    Shapes: matrix (rows, D), D a multiple of 4 up to 8192; row_scale and row_norm (rows); col_scale (D); col_sumsq_partial (P, D).
    Dtypes: float32.  Layout: contiguous.  Raises: ArgumentError, NoVariantError, LaunchError.
    """
    count = _CTAS_PER_SM * get_num_sms(matrix.get_device()) if matrix.is_cuda else 1
    result: tuple[torch.Tensor, torch.Tensor] = _step((matrix, row_scale, col_scale), (), (count, eps))
    return result if matrix.shape[0] else (result[0], torch.zeros_like(result[1]))


def engram_sinkhorn_step_reduce(col_sumsq_partial: torch.Tensor, col_sumsq: torch.Tensor) -> None:
    """Write the sums of the columns of ``col_sumsq_partial``, added from the first row to the last, into ``col_sumsq``.

    Shapes: col_sumsq_partial (P, D), col_sumsq (D).  Dtypes: float32.  Layout: contiguous.  Raises: ArgumentError, NoVariantError, LaunchError.
    """
    _step_reduce((col_sumsq_partial,), (), (), (col_sumsq,))


def engram_sinkhorn_finalize(
    matrix: torch.Tensor,
    row_scale: torch.Tensor,
    col_scale: torch.Tensor,
    eps: float,
    alpha: float,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return x * (alpha / (norm + eps)) with x and the norm of each row as in ``engram_sinkhorn_step``, in ``out`` if given.

    Shapes: matrix, out (rows, D), D a multiple of 4 up to 8192; row_scale (rows); col_scale (D).  Dtypes: float32.
    Layout: contiguous; ``out`` may be matrix.  Raises: ArgumentError, NoVariantError, LaunchError.
    """
    result: torch.Tensor = _finalize((matrix, row_scale, col_scale), (), (eps, alpha), None if out is None else (out,))
    return result

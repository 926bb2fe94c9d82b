"""References of the norm's weight merged into fn."""

from __future__ import annotations

import torch

_CHUNK_ROWS = 1 << 10


def fn_normw_merge(fn: torch.Tensor, normw: torch.Tensor) -> torch.Tensor:
    """Return fn[r, c] * normw[c].

    Shapes: fn (R, C), normw (C) -> (R, C).  Dtypes: float32.
    """
    return fn * normw


def fn_normw_merge_bwd(
    fn: torch.Tensor,
    normw: torch.Tensor,
    out_fn_grad: torch.Tensor,
    fn_grad: torch.Tensor | None,
    normw_grad: torch.Tensor | None,
) -> tuple[torch.Tensor, ...]:
    """Return those of (fn_grad, normw_grad) that are given plus their gradients of ``fn_normw_merge``.

    fn_grad + out_fn_grad * normw, rounded once to float32; normw_grad + the sum of out_fn_grad * fn over the rows, here in float64.
    Shapes: fn, out_fn_grad, fn_grad (R, C), normw, normw_grad (C).  Dtypes: float32.
    """
    results = []
    if fn_grad is not None:
        rows = zip(fn_grad.split(_CHUNK_ROWS), out_fn_grad.split(_CHUNK_ROWS), strict=True)
        results.append(torch.cat([(old.double() + grad.double() * normw.double()).to(fn.dtype) for old, grad in rows]))
    if normw_grad is not None:
        rows = zip(out_fn_grad.split(_CHUNK_ROWS), fn.split(_CHUNK_ROWS), strict=True)
        total = sum(((grad.double() * value.double()).sum(dim=0) for grad, value in rows), normw_grad.double())
        results.append(total.to(fn.dtype))
    return tuple(results)

"""The Sinkhorn optimiser step on a GPU, against the references."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from gpu_checks import on_gpu_with, opcheck, same

from tkbuild import ops, reference
from tkbuild.errors import ArgumentError, NoVariantError
from tkbuild.runtime.launcher import native

pytestmark = on_gpu_with(
    "engram.sinkhorn_step", "engram.sinkhorn_finalize", "engram.sinkhorn_momentum_update", "engram.sinkhorn_step_reduce"
)

BF16, F32 = torch.bfloat16, torch.float32


def random(*shape: int, dtype: torch.dtype = F32) -> torch.Tensor:
    return torch.randn(shape, device="cuda").to(dtype)


def inputs(rows: int, width: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """matrix, row_scale and col_scale."""
    return random(rows, width), random(rows).abs() + 0.5, random(width).abs() + 0.5


@pytest.mark.parametrize("grad_dtype", [BF16, F32])
@pytest.mark.parametrize("momentum_dtype", [BF16, F32])
@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("shape", [(1001, 256), (8,), (3, 7, 5120)])
def test_momentum_update(grad_dtype: torch.dtype, momentum_dtype: torch.dtype, nesterov: bool, shape: tuple[int, ...]) -> None:
    grad, momentum = random(*shape, dtype=grad_dtype), random(*shape, dtype=momentum_dtype)
    wanted = reference.engram.sinkhorn_momentum_update(grad, momentum, beta=0.95, complement=1 - 0.95, nesterov=int(nesterov))
    out = ops.engram.engram_sinkhorn_momentum_update(grad, momentum, 0.95, nesterov)
    assert same(momentum, wanted[0])
    assert same(out, wanted[1])


@pytest.mark.parametrize("rows", [1, 1001, 10001])
@pytest.mark.parametrize("width", [256, 1024, 5120, 8192])
def test_step_and_reduce(rows: int, width: int) -> None:
    matrix, row_scale, col_scale = inputs(rows, width)
    old = row_scale.clone()
    norm, partial = ops.engram.engram_sinkhorn_step(matrix, row_scale, col_scale, 1e-20)
    assert len(partial) == 3 * ops.get_num_sms()
    wanted = reference.engram.sinkhorn_step(matrix, old, col_scale, eps=1e-20, num_partials=len(partial))
    for ours, theirs in zip((row_scale, norm, partial), wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    total = torch.empty(width, device="cuda")
    ops.engram.engram_sinkhorn_step_reduce(partial, total)
    assert same(total, reference.engram.sinkhorn_step_reduce(partial))
    again = old.clone()
    assert all(
        same(a, b) for a, b in zip(ops.engram.engram_sinkhorn_step(matrix, again, col_scale, 1e-20), (norm, partial), strict=True)
    )
    assert same(again, row_scale)


@pytest.mark.parametrize("rows", [1, 1001, 10001])
@pytest.mark.parametrize("width", [256, 1024, 5120, 8192])
def test_finalize(rows: int, width: int) -> None:
    matrix, row_scale, col_scale = inputs(rows, width)
    out = ops.engram.engram_sinkhorn_finalize(matrix, row_scale, col_scale, 1e-20, math.sqrt(width))
    wanted = reference.engram.sinkhorn_finalize(matrix, row_scale, col_scale, eps=1e-20, alpha=math.sqrt(width))
    torch.testing.assert_close(out, wanted)
    assert ops.engram.engram_sinkhorn_finalize(matrix, row_scale, col_scale, 1e-20, math.sqrt(width), out=matrix) is matrix
    assert same(matrix, out)


def test_rows_of_zeros_stay_zeros() -> None:
    matrix, row_scale, col_scale = inputs(100, 256)
    matrix[::3] = 0
    out = ops.engram.engram_sinkhorn_finalize(matrix, row_scale, col_scale, 1e-20, 16.0)
    assert not out[::3].any()
    assert bool(out.isfinite().all())
    norm, partial = ops.engram.engram_sinkhorn_step(matrix, row_scale, col_scale, 1e-20)
    assert not norm[::3].any()
    assert bool(partial.isfinite().all())


def test_alternating_steps_balance_rows_and_columns() -> None:
    matrix, row_scale, col_scale = inputs(1001, 256)
    total = torch.empty(256, device="cuda")
    for _ in range(20):
        _, partial = ops.engram.engram_sinkhorn_step(matrix, row_scale, col_scale, 1e-20)
        ops.engram.engram_sinkhorn_step_reduce(partial, total)
        col_scale *= (1001 / 256 / total).sqrt()
    squares = (row_scale[:, None] * matrix * col_scale).square()
    torch.testing.assert_close(squares.sum(0), torch.full((256,), 1001 / 256, device="cuda"), rtol=1e-2, atol=0)
    torch.testing.assert_close(squares.sum(1), torch.ones(1001, device="cuda"), rtol=1e-2, atol=0)


def test_no_rows() -> None:
    matrix, row_scale, col_scale = inputs(0, 256)
    before = native().launch_count()
    norm, partial = ops.engram.engram_sinkhorn_step(matrix, row_scale, col_scale, 1e-20)
    assert norm.shape == (0,)
    assert not partial.any()
    assert ops.engram.engram_sinkhorn_finalize(matrix, row_scale, col_scale, 1e-20, 1.0).shape == (0, 256)
    assert ops.engram.engram_sinkhorn_momentum_update(matrix, matrix.clone(), 0.9).shape == (0, 256)
    assert native().launch_count() == before


@pytest.mark.parametrize(
    "call",
    [
        lambda e, m, r, c: e.engram_sinkhorn_momentum_update(m, m.half(), 0.9),
        lambda e, m, r, c: e.engram_sinkhorn_momentum_update(m, m[:5].clone(), 0.9),
        lambda e, m, r, c: e.engram_sinkhorn_momentum_update(m.T, m.T, 0.9),
        lambda e, m, r, c: e.engram_sinkhorn_momentum_update(c[:9].clone(), c[:9].clone(), 0.9),
        lambda e, m, r, c: e.engram_sinkhorn_step(m.bfloat16(), r, c, 1e-20),
        lambda e, m, r, c: e.engram_sinkhorn_step(m, r[:5], c, 1e-20),
        lambda e, m, r, c: e.engram_sinkhorn_step(m[:, :254], r, c[:254], 1e-20),
        lambda e, m, r, c: e.engram_sinkhorn_step(*inputs(3, 8196), 1e-20),
        lambda e, m, r, c: e.engram_sinkhorn_step_reduce(m, r),
        lambda e, m, r, c: e.engram_sinkhorn_step_reduce(m.T, r),
        lambda e, m, r, c: e.engram_sinkhorn_finalize(m, r, c[:128], 1e-20, 1.0),
        lambda e, m, r, c: e.engram_sinkhorn_finalize(m, r, c, 1e-20, 1.0, out=m.bfloat16()),
        lambda e, m, r, c: e.engram_sinkhorn_finalize(m.cpu(), r.cpu(), c.cpu(), 1e-20, 1.0),
    ],
)
def test_refusals_launch_nothing(call: Any) -> None:
    given = inputs(7, 256)
    before = native().launch_count()
    with pytest.raises((ArgumentError, NoVariantError)):
        call(ops.engram, *given)
    assert native().launch_count() == before


def test_opcheck() -> None:
    matrix, row_scale, col_scale = inputs(7, 256)
    flat = matrix.view(-1)
    factors = {"beta": 0.5, "complement": 0.5, "nesterov": 1}
    opcheck(torch.ops.tkbuild.engram_sinkhorn_momentum_update, (flat, flat.bfloat16()), factors)
    opcheck(torch.ops.tkbuild.engram_sinkhorn_step, (matrix, row_scale, col_scale), {"num_partials": 3, "eps": 1e-20})
    opcheck(torch.ops.tkbuild.engram_sinkhorn_step_reduce, (matrix,))
    opcheck(torch.ops.tkbuild.engram_sinkhorn_finalize, (matrix, row_scale, col_scale), {"eps": 1e-20, "alpha": 1.0})

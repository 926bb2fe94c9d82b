"""The references of the mixes before a layer, against values written out by hand and against autograd."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch

from tkbuild.reference.mhc import (
    pre_norm_fn_mul,
    pre_norm_fn_mul_bwd,
    reduce_partials_and_rmsnorm,
    reduce_partials_and_rmsnorm_bwd,
)
from tkbuild.reference.mhc.norm_fn import round_to_tf32

F64 = torch.float64


def random(*shape: int, seed: int = 0, dtype: torch.dtype = F64) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def test_products_and_squares_of_each_group() -> None:
    x = torch.zeros(2, 512, dtype=torch.bfloat16)
    x[0, 0], x[0, 255], x[0, 256], x[1, 511] = 2.0, 3.0, 5.0, -1.0
    fn = torch.arange(24.0)[:, None].expand(24, 512)
    out_mul, sqrsum = pre_norm_fn_mul(x, fn, num_groups=2, num_splits=1)
    assert out_mul.shape == (1, 2, 2, 24)
    torch.testing.assert_close(out_mul[0, :, :, 1], torch.tensor([[5.0, 5.0], [0.0, -1.0]]))
    torch.testing.assert_close(out_mul[0, :, :, 7], torch.tensor([[35.0, 35.0], [0.0, -7.0]]))
    torch.testing.assert_close(sqrsum[0], torch.tensor([[13.0, 25.0], [0.0, 1.0]]))


@pytest.mark.parametrize(("splits", "bounds"), [(1, [0, 1280]), (2, [0, 640, 1280]), (7, [0, 128, 320, 512, 704, 896, 1088, 1280])])
def test_splits_take_whole_blocks(splits: int, bounds: list[int]) -> None:
    x, fn = random(3, 1280), random(24, 1280, seed=1)
    out_mul, sqrsum = pre_norm_fn_mul(x, fn, num_groups=1, num_splits=splits)
    for s, (first, last) in enumerate(itertools.pairwise(bounds)):
        torch.testing.assert_close(out_mul[s, :, 0], x[:, first:last] @ fn[:, first:last].T)
        torch.testing.assert_close(sqrsum[s, :, 0], x[:, first:last].square().sum(1))


def test_rounding_to_tf32_and_where_it_is_done() -> None:
    unit = 2.0**-10
    given = [1 + unit / 2, 1 + unit / 4, -1 - unit / 2, 1 + 0.75 * unit, math.inf, math.nan, 0.0, 3.4e38]
    rounded = round_to_tf32(torch.tensor(given))
    wanted = torch.tensor([1 + unit, 1.0, -1 - unit, 1 + unit, math.inf, math.nan, 0.0, 3.4e38])
    torch.testing.assert_close(rounded, wanted, rtol=2.0**-11, atol=0.0, equal_nan=True)
    assert torch.equal(rounded[:5], wanted[:5])
    all_ones = torch.tensor([0x7FFFFFFF], dtype=torch.int32).view(torch.float32)
    assert round_to_tf32(all_ones).isnan()
    x = torch.ones(1, 256, dtype=torch.bfloat16)
    out_mul, _ = pre_norm_fn_mul(x, torch.full((24, 256), 1 + unit / 4), num_groups=1, num_splits=1)
    assert torch.equal(out_mul, torch.full((1, 1, 1, 24), 256 * (1 + unit / 4)))
    grads, ones = torch.full((1, 1, 24), 1 + unit / 4), torch.ones(24, 256)
    x_grad, fn_grad = pre_norm_fn_mul_bwd(grads, torch.zeros(1, 1), x.float(), ones, x.float(), ones)
    assert torch.equal(x_grad, torch.full((1, 256), 24.0))
    assert torch.equal(fn_grad, torch.full((24, 256), 1 + unit / 4))


def test_normalisation_by_hand() -> None:
    out_mul = torch.zeros(2, 1, 2, 24)
    out_mul[0, 0, 0, 3], out_mul[1, 0, 0, 3], out_mul[0, 0, 1, 3] = 1.0, 2.0, 4.0
    sqrsum = torch.tensor([[[4.0, 60.0]], [[8.0, 4.0]]])
    total, squares, out = reduce_partials_and_rmsnorm(out_mul, sqrsum, rms_group_size=4, rms_eps=0.0)
    assert total[0, :, 3].tolist() == [3.0, 4.0]
    assert squares.tolist() == [[12.0, 64.0]]
    torch.testing.assert_close(out[0, 3], torch.tensor(3 / math.sqrt(3) + 4 / 4))
    assert out[0, :3].tolist() == [0.0] * 3


def test_normalisation_backward_by_hand() -> None:
    out_mul, sqrsum = torch.zeros(1, 1, 24), torch.full((1, 1), 12.0)
    out_mul[0, 0, 5] = 3.0
    out_grad = torch.zeros(1, 24)
    out_grad[0, 5] = 2.0
    mul_grad, sqr_grad = reduce_partials_and_rmsnorm_bwd(out_grad, out_mul, sqrsum, rms_group_size=4, rms_eps=1.0)
    torch.testing.assert_close(mul_grad[0, 0, 5], torch.tensor(1.0))  # sqrt(12 / 4 + 1) = 2
    torch.testing.assert_close(sqr_grad, torch.tensor([[-2.0 * 3.0 / 2.0 / 16.0 / 2.0]]))


class NormFn(torch.autograd.Function):
    """Product and normalisation with the backward references."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, fn: torch.Tensor, groups: int, splits: int) -> torch.Tensor:
        size = x.shape[1] // groups
        partials = pre_norm_fn_mul(x, fn, num_groups=groups, num_splits=splits)
        out_mul, sqrsum, out = reduce_partials_and_rmsnorm(*partials, rms_group_size=size, rms_eps=0.1)
        ctx.save_for_backward(x, fn, out_mul, sqrsum)
        ctx.size = size
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        x, fn, out_mul, sqrsum = ctx.saved_tensors
        given = reduce_partials_and_rmsnorm_bwd(grads[0], out_mul, sqrsum, rms_group_size=ctx.size, rms_eps=0.1)
        return *pre_norm_fn_mul_bwd(*given, x, fn, x, fn), None, None


def norm_fn(x: torch.Tensor, fn: torch.Tensor, groups: int, splits: int) -> torch.Tensor:
    partials = pre_norm_fn_mul(x, fn, num_groups=groups, num_splits=splits)
    return reduce_partials_and_rmsnorm(*partials, rms_group_size=x.shape[1] // groups, rms_eps=0.1)[2]


@pytest.mark.parametrize(("groups", "splits"), [(1, 1), (1, 3), (2, 2)])
def test_gradients_equal_those_of_autograd(groups: int, splits: int) -> None:
    x, fn, grad = random(5, 1024).requires_grad_(), random(24, 1024, seed=1).requires_grad_(), random(5, 24, seed=2)
    expected = torch.autograd.grad(norm_fn(x, fn, groups, splits), (x, fn), grad)
    got = torch.autograd.grad(NormFn.apply(x, fn, groups, splits), (x, fn), grad)
    for ours, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("groups", [1, 2])
def test_gradients_equal_finite_differences(groups: int) -> None:
    x, fn = random(2, 8).requires_grad_(), random(24, 8, seed=1).requires_grad_()
    assert torch.autograd.gradcheck(lambda a, b: NormFn.apply(a, b, groups, 1), (x, fn))


def test_gradients_that_are_not_wanted_and_accumulation() -> None:
    grads = (random(3, 1, 24), random(3, 1, seed=1))
    x, fn, old = random(3, 256, seed=2), random(24, 256, seed=3), random(3, 256, seed=4)
    x_grad, fn_grad = pre_norm_fn_mul_bwd(*grads, x, fn, old, fn)
    torch.testing.assert_close(pre_norm_fn_mul_bwd(*grads, x, fn, old, None, accumulate=1)[0], x_grad + old)
    torch.testing.assert_close(pre_norm_fn_mul_bwd(*grads, x, fn, None, fn)[0], fn_grad)
    assert pre_norm_fn_mul_bwd(*grads, x, fn, None, None) == ()


def test_no_tokens() -> None:
    fn = random(24, 256)
    empty = torch.empty(0, 256, dtype=F64)
    partials = pre_norm_fn_mul(empty, fn, num_groups=1, num_splits=2)
    assert [t.shape for t in partials] == [(2, 0, 1, 24), (2, 0, 1)]
    out_mul, sqrsum, out = reduce_partials_and_rmsnorm(*partials, rms_group_size=256, rms_eps=1e-6)
    grads = reduce_partials_and_rmsnorm_bwd(out, out_mul, sqrsum, rms_group_size=256, rms_eps=1e-6)
    x_grad, fn_grad = pre_norm_fn_mul_bwd(*grads, empty, fn, empty, fn)
    assert x_grad.shape == (0, 256)
    assert torch.equal(fn_grad, torch.zeros_like(fn))

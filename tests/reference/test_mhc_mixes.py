"""The references of the mixes and of the merged weight, against values written out by hand and against autograd."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from tkbuild.reference import mhc

F64 = torch.float64
FLAGS = {"mhc_post_mult_value": 2.0, "mhc_pre_eps": 1e-2}


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)), dtype=F64)


class Head(torch.autograd.Function):
    """The forward with the backward under test, the partial sums added up."""

    @staticmethod
    def forward(ctx: Any, *tensors: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(*tensors)
        return mhc.head_compute_mix(*tensors, mhc_pre_eps=1e-2)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, ...]:
        partials = torch.empty(3, 1, dtype=F64), torch.empty(3, 4, dtype=F64)
        scale_grad, base_grad, input_grad = mhc.head_compute_mix_bwd(grads[0], *ctx.saved_tensors, *partials)
        return input_grad, scale_grad.sum(0), base_grad.sum(0)


class Split(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        results = mhc.pre_split_mixes(*tensors, **FLAGS)
        ctx.save_for_backward(tensors[0], results[1], *tensors[1:])
        return results

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return mhc.pre_split_mixes_bwd(*grads, *ctx.saved_tensors, mhc_post_mult_value=2.0)


class Merge(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *tensors: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(*tensors)
        return mhc.fn_normw_merge(*tensors)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return mhc.fn_normw_merge_bwd(*ctx.saved_tensors, grads[0], *(torch.zeros_like(t) for t in ctx.saved_tensors))


@pytest.mark.parametrize(
    ("function", "shapes"),
    [
        (Head, [(3, 4), (1,), (4,)]),
        (Split, [(3, 24), (3,), (24,)]),
        (Merge, [(3, 5), (5,)]),
    ],
)
def test_gradients_equal_finite_differences(function: Any, shapes: list[tuple[int, ...]]) -> None:
    tensors = [random(*shape).requires_grad_() for shape in shapes]
    assert torch.autograd.gradcheck(function.apply, tensors)


def test_gradients_equal_those_of_autograd() -> None:
    tensors = [random(*shape).requires_grad_() for shape in [(300, 24), (3,), (24,)]]
    results = mhc.pre_split_mixes(*tensors, **FLAGS)
    grads = [random(*t.shape, seed=1) for t in results]
    expected = torch.autograd.grad(results, tensors, grads)
    mixes, scale, base = (t.detach() for t in tensors)
    found = mhc.pre_split_mixes_bwd(*grads, mixes, results[1].detach(), scale, base, mhc_post_mult_value=2.0)
    torch.testing.assert_close(found, expected)


def test_head_by_hand() -> None:
    mix = torch.tensor([[0.0, math.log(3.0) / 2, 0.0, 0.0]])
    out = mhc.head_compute_mix(mix, torch.tensor([2.0]), torch.tensor([0.0, 0.0, -math.log(3.0), 0.0]), mhc_pre_eps=0.5)
    torch.testing.assert_close(out, torch.tensor([[1.0, 1.25, 0.75, 1.0]]))


def test_rows_of_partial_sums_have_blocks_of_tokens_in_turn() -> None:
    grad, mix = torch.ones(300, 4), torch.zeros(300, 4)
    given = torch.empty(2, 1), torch.empty(2, 4)
    scale_grad, base_grad, input_grad = mhc.head_compute_mix_bwd(grad, mix, torch.ones(1), torch.zeros(4), *given)
    assert base_grad.tolist() == [[43.0] * 4, [32.0] * 4]  # 172 and 128 tokens, a quarter each
    assert scale_grad.tolist() == [[0.0], [0.0]]
    assert input_grad.tolist() == [[0.25] * 4] * 300


def test_split_by_hand() -> None:
    scale, base = torch.tensor([1.0, 2.0, 3.0]), torch.zeros(24)
    base[8:] = torch.arange(16.0)
    pre, post, comb = mhc.pre_split_mixes(torch.ones(1, 24), scale, base, **FLAGS)
    torch.testing.assert_close(pre, torch.full((1, 4), 1 / (1 + math.exp(-1.0)) + 1e-2))
    torch.testing.assert_close(post, torch.full((1, 4), 2 / (1 + math.exp(-2.0))))
    assert comb.tolist() == [[3.0 + i for i in range(16)]]


def test_mixes_far_out_saturate() -> None:
    mixes = torch.tensor([[-1000.0, 1000.0] * 12])
    pre, post, _ = mhc.pre_split_mixes(mixes, torch.ones(3), torch.zeros(24), mhc_post_mult_value=2.0, mhc_pre_eps=0.0)
    assert pre.tolist() == [[0.0, 1.0, 0.0, 1.0]]
    assert post.tolist() == [[0.0, 2.0, 0.0, 2.0]]


def test_merge_accumulates_what_is_given() -> None:
    fn, weight = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([10.0, 100.0])
    assert mhc.fn_normw_merge(fn, weight).tolist() == [[10.0, 200.0], [30.0, 400.0]]
    grad, old = torch.tensor([[1.0, 1.0], [2.0, 2.0]]), torch.tensor([0.5, 0.5])
    fn_grad, weight_grad = mhc.fn_normw_merge_bwd(fn, weight, grad, torch.ones(2, 2), old)
    assert fn_grad.tolist() == [[11.0, 101.0], [21.0, 201.0]]
    assert weight_grad.tolist() == [7.5, 10.5]
    assert len(mhc.fn_normw_merge_bwd(fn, weight, grad, None, old)) == 1
    assert mhc.fn_normw_merge_bwd(fn, weight, grad, None, None) == ()


def test_no_tokens() -> None:
    mix, scale, base = torch.empty(0, 4), torch.ones(1), torch.zeros(4)
    assert mhc.head_compute_mix(mix, scale, base, mhc_pre_eps=0.0).shape == (0, 4)
    sums = mhc.head_compute_mix_bwd(mix, mix, scale, base, torch.empty(2, 1), torch.empty(2, 4))
    assert sums[1].tolist() == [[0.0] * 4] * 2
    mixes, comb, scales, bases = torch.empty(0, 24), torch.empty(0, 16), torch.ones(3), torch.zeros(24)
    assert [t.shape for t in mhc.pre_split_mixes(mixes, scales, bases, **FLAGS)] == [(0, 4), (0, 4), (0, 16)]
    grads = mhc.pre_split_mixes_bwd(mix, mix, comb, mixes, mix, scales, bases, mhc_post_mult_value=2.0)
    assert grads[1].tolist() == [0.0] * 3
    assert grads[2].tolist() == [0.0] * 24

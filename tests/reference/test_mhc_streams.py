"""The references of expand, post and pre_apply_mix, against values written out by hand and against autograd."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tkbuild.reference import mhc

BF16, F64 = torch.bfloat16, torch.float64


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)), dtype=F64)


class Expand(torch.autograd.Function):
    """The forward with the backward under test, three streams."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return mhc.expand_to_mhc(x, m=3)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        return mhc.expand_to_mhc_bwd(grads[0])


class Post(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *tensors: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(*tensors)
        return mhc.post(*tensors)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return mhc.post_bwd(*ctx.saved_tensors, grads[0])


class ApplyMix(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, mix: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, mix)
        return mhc.pre_apply_mix(x, mix)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x, mix = ctx.saved_tensors
        return mhc.pre_apply_mix_bwd(grads[0], x, mix, torch.zeros_like(x))


@pytest.mark.parametrize(
    ("function", "shapes"),
    [
        (Expand, [(2, 5)]),
        (Post, [(2, 5), (2, 4, 5), (2, 4), (2, 4, 4)]),
        (ApplyMix, [(2, 4, 5), (2, 4)]),
    ],
)
def test_gradients_equal_finite_differences(function: Any, shapes: list[tuple[int, ...]]) -> None:
    tensors = [random(*shape).requires_grad_() for shape in shapes]
    assert torch.autograd.gradcheck(function.apply, tensors)


def test_gradients_equal_those_of_autograd() -> None:
    tensors = [random(*shape).requires_grad_() for shape in [(3, 7), (3, 4, 7), (3, 4), (3, 4, 4)]]
    grad = random(3, 4, 7, seed=1)
    expected = torch.autograd.grad(mhc.post(*tensors), tensors, grad)
    torch.testing.assert_close(mhc.post_bwd(*(t.detach() for t in tensors), grad), expected)


def test_expand_copies_and_adds_up() -> None:
    x = torch.tensor([[1.0, 2.0], [3.0, 4.0]], dtype=BF16)
    out = mhc.expand_to_mhc(x, m=2)
    assert out.tolist() == [[[1.0, 2.0], [1.0, 2.0]], [[3.0, 4.0], [3.0, 4.0]]]
    assert out.is_contiguous()
    assert mhc.expand_to_mhc_bwd(out).tolist() == [[2.0, 4.0], [6.0, 8.0]]


def test_expand_adds_in_float32_and_rounds_once() -> None:
    grad = torch.tensor([256.0, 0.75, 0.75], dtype=BF16).view(1, 3, 1)
    assert mhc.expand_to_mhc_bwd(grad).item() == 258.0  # bfloat16 sums would stay at 256


def test_post_mixes_by_output() -> None:
    x = torch.tensor([[1.0]], dtype=BF16)
    residual = torch.tensor([[[1.0], [10.0]]], dtype=BF16)
    comb = torch.tensor([[[1.0, 2.0], [3.0, 4.0]]])  # [i, o]
    out = mhc.post(x, residual, torch.tensor([[100.0, 200.0]]), comb)
    assert out.flatten().tolist() == [131.0, 242.0]


def test_post_backward_by_hand() -> None:
    x, residual = torch.tensor([[2.0]], dtype=BF16), torch.tensor([[[1.0], [10.0]]], dtype=BF16)
    comb, d_o = torch.tensor([[[1.0, 2.0], [3.0, 4.0]]]), torch.tensor([[[1.0], [5.0]]], dtype=BF16)
    d_x, d_residual, d_post, d_comb = mhc.post_bwd(x, residual, torch.tensor([[7.0, 8.0]]), comb, d_o)
    assert d_x.tolist() == [[47.0]]
    assert d_residual.flatten().tolist() == [11.0, 23.0]
    assert d_post.tolist() == [[2.0, 10.0]]
    assert d_comb.tolist() == [[[1.0, 5.0], [10.0, 50.0]]]


def test_apply_mix_by_hand() -> None:
    x, mix = torch.tensor([[[1.0], [10.0]]], dtype=BF16), torch.tensor([[2.0, 3.0]])
    assert mhc.pre_apply_mix(x, mix).tolist() == [[32.0]]
    o_grad, old = torch.tensor([[4.0]], dtype=BF16), torch.tensor([[[1.0], [1.0]]], dtype=BF16)
    x_grad, mix_grad = mhc.pre_apply_mix_bwd(o_grad, x, mix, old)
    assert x_grad.flatten().tolist() == [9.0, 13.0]
    assert mix_grad.tolist() == [[4.0, 40.0]]
    assert mhc.pre_apply_mix_bwd(o_grad, x, mix, old, accumulate=0)[0].flatten().tolist() == [8.0, 12.0]
    assert len(mhc.pre_apply_mix_bwd(o_grad, x, mix, None)) == 1


def test_results_have_the_dtypes_of_the_streams() -> None:
    x, residual = random(3, 8).to(BF16), random(3, 4, 8).to(BF16)
    mix, comb = random(3, 4).float(), random(3, 4, 4).float()
    assert mhc.post(x, residual, mix, comb).dtype == BF16
    assert [t.dtype for t in mhc.post_bwd(x, residual, mix, comb, residual)] == [BF16, BF16, torch.float32, torch.float32]
    assert mhc.pre_apply_mix(residual, mix).dtype == BF16
    assert [t.dtype for t in mhc.pre_apply_mix_bwd(x, residual, mix, residual)] == [BF16, torch.float32]


def test_no_tokens() -> None:
    x, residual = torch.empty(0, 8, dtype=BF16), torch.empty(0, 4, 8, dtype=BF16)
    mix, comb = torch.empty(0, 4), torch.empty(0, 4, 4)
    assert mhc.expand_to_mhc(x, m=4).shape == mhc.post(x, residual, mix, comb).shape == (0, 4, 8)
    assert mhc.expand_to_mhc_bwd(residual).shape == mhc.pre_apply_mix(residual, mix).shape == (0, 8)
    assert [t.shape[0] for t in mhc.post_bwd(x, residual, mix, comb, residual)] == [0] * 4
    assert mhc.pre_apply_mix_bwd(x, residual, mix, residual)[1].shape == (0, 4)

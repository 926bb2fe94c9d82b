"""The references of the manifold hyper-connection kernels, against values written out by hand and against autograd."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from tkbuild.reference.mhc import sinkhorn, sinkhorn_bwd

#: softmax gives [[1/2, 1/2], [1/4, 3/4]].
X = torch.tensor([[[0.0, 0.0], [0.0, math.log(3.0)]]], dtype=torch.float64)


@pytest.mark.parametrize(
    ("repeat", "expected"),
    [
        (1, [[2 / 3, 2 / 5], [1 / 3, 3 / 5]]),
        (2, [[7 / 11, 7 / 19], [4 / 11, 12 / 19]]),
    ],
)
def test_columns_are_normalised_first_and_last(repeat: int, expected: list[list[float]]) -> None:
    out = sinkhorn(X, repeat=repeat, eps=0.0)
    torch.testing.assert_close(out, torch.tensor([expected], dtype=torch.float64))


def test_eps_is_added_to_the_softmax_and_to_the_sum() -> None:
    out = sinkhorn(torch.zeros(2, 4, 4), repeat=1, eps=0.5)
    torch.testing.assert_close(out, torch.full((2, 4, 4), (1 / 4 + 1 / 2) / (4 * 3 / 4 + 1 / 2)))


def test_many_rounds_give_a_doubly_stochastic_matrix() -> None:
    x = torch.randn(50, 4, 4, generator=torch.Generator().manual_seed(0))
    out = sinkhorn(x, repeat=50, eps=1e-6)
    torch.testing.assert_close(out.sum(-1), torch.ones(50, 4), atol=1e-4, rtol=0)
    torch.testing.assert_close(out.sum(-2), torch.ones(50, 4), atol=1e-5, rtol=0)


def test_large_inputs_do_not_overflow() -> None:
    out = sinkhorn(torch.diag(torch.full((4,), 1000.0))[None], repeat=3, eps=1e-6)
    torch.testing.assert_close(out, torch.eye(4)[None], atol=1e-5, rtol=0)


def test_the_gradient_of_one_entry() -> None:
    grad_out = torch.tensor([[[1.0, 0.0], [0.0, 0.0]]])
    grad = sinkhorn_bwd(grad_out, torch.zeros(1, 2, 2), repeat=1, eps=0.0)
    torch.testing.assert_close(grad, torch.tensor([[[1 / 8, -1 / 8], [-1 / 8, 1 / 8]]]))


@pytest.mark.parametrize("repeat", [1, 2, 5])
@pytest.mark.parametrize("eps", [1e-6, 1e-2])
def test_the_gradient_equals_that_of_autograd(repeat: int, eps: float) -> None:
    generator = torch.Generator().manual_seed(repeat)
    x = torch.randn(6, 4, 4, generator=generator, dtype=torch.float64, requires_grad=True)
    grad_out = torch.randn(6, 4, 4, generator=generator, dtype=torch.float64)
    (expected,) = torch.autograd.grad(sinkhorn(x, repeat=repeat, eps=eps), x, grad_out)
    torch.testing.assert_close(sinkhorn_bwd(grad_out, x.detach(), repeat=repeat, eps=eps), expected)


class Sinkhorn(torch.autograd.Function):
    """The forward with the backward under test, three rounds."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return sinkhorn(x, repeat=3, eps=1e-2)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return sinkhorn_bwd(grads[0], x, repeat=3, eps=1e-2)


def test_the_gradient_equals_finite_differences() -> None:
    x = torch.randn(2, 4, 4, generator=torch.Generator().manual_seed(3), dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(Sinkhorn.apply, (x,))


def test_no_matrices() -> None:
    empty = torch.empty(0, 4, 4)
    assert sinkhorn(empty, repeat=10, eps=1e-6).shape == (0, 4, 4)
    assert sinkhorn_bwd(empty, empty, repeat=10, eps=1e-6).shape == (0, 4, 4)

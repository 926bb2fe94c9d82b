"""The references of the gate, against values written out by hand and against autograd."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from tkbuild.reference.engram import gate_bwd, gate_fwd

EPS, CLAMP = 1e-6, 1e-3
F64 = torch.float64
Inputs = tuple[torch.Tensor, ...]


def inputs(tokens: int, streams: int = 4, width: int = 8, dtype: torch.dtype = F64) -> Inputs:
    """hidden_states, k, v and weight."""
    generator = torch.Generator().manual_seed(tokens)
    shapes = (tokens, streams, width), (tokens, streams, width), (tokens, width), (streams, width)
    x, k, v, weight = (torch.randn(shape, generator=generator, dtype=F64) for shape in shapes)
    return x.to(dtype), k.to(dtype), v.to(dtype), weight if dtype == F64 else weight.float()


def forward(
    x: torch.Tensor, k: torch.Tensor, v: torch.Tensor, weight: torch.Tensor, mask: Any = None, clamp: float = CLAMP
) -> Inputs:
    """dot, gate, rstd_x, rstd_k and the output."""
    statistics = [torch.zeros(x.shape[:2], dtype=weight.dtype) for _ in range(4)]
    return gate_fwd(x, k, v, weight, mask, *statistics, eps=EPS, clamp_value=clamp)


class Gate(torch.autograd.Function):
    """The forward with the backward under test."""

    @staticmethod
    def forward(ctx: Any, *given: torch.Tensor) -> torch.Tensor:
        *statistics, out = forward(*given, mask=Gate.mask)
        ctx.save_for_backward(*given, *statistics)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        *grad, partial = gate_bwd(grads[0], *ctx.saved_tensors, Gate.mask, clamp_value=CLAMP, num_partials=2)
        return *grad, partial.sum(0)

    mask: torch.Tensor | None = None


def test_one_token_by_hand() -> None:
    x, k, v = (
        torch.tensor([[[3.0, 4.0]]], dtype=F64),
        torch.tensor([[[1.0, 1.0]]], dtype=F64),
        torch.tensor([[2.0, -2.0]], dtype=F64),
    )
    weight = torch.tensor([[1.0, 2.0]], dtype=F64)
    dot, gate, rstd_x, rstd_k, out = gate_fwd(x, k, v, weight, None, *torch.zeros(4, 1, 1, dtype=F64), eps=0.0, clamp_value=0.0)
    assert dot.item() == 11.0
    assert rstd_x.item() == pytest.approx(1 / math.sqrt(12.5))
    assert rstd_k.item() == 1.0
    score = 1 / (1 + math.exp(-math.sqrt(11 / math.sqrt(12.5) / math.sqrt(2))))
    assert gate.item() == pytest.approx(score)
    assert out.flatten().tolist() == pytest.approx([3 + 2 * score, 4 - 2 * score])


@pytest.mark.parametrize(("value", "root"), [(0.0, 0.5), (1e-20, 0.5), (-1e-20, -0.5)])
def test_the_clamp_keeps_the_sign_and_makes_zero_positive(value: float, root: float) -> None:
    k = torch.full((1, 1, 2), value)
    _, gate, *_ = forward(torch.ones(1, 1, 2), k, torch.ones(1, 2), torch.ones(1, 2), clamp=0.25)
    assert gate.item() == pytest.approx(1 / (1 + math.exp(-root)))


def test_only_asked_for_statistics_are_returned() -> None:
    x, k, v, weight = inputs(3)
    old = torch.zeros(3, 4, dtype=F64)
    wanted = forward(x, k, v, weight)
    (out,) = gate_fwd(x, k, v, weight, None, None, None, None, None, eps=EPS, clamp_value=CLAMP)
    rstd_x, same = gate_fwd(x, k, v, weight, None, None, None, old, None, eps=EPS, clamp_value=CLAMP)
    assert torch.equal(out, wanted[4])
    assert torch.equal(same, wanted[4])
    assert torch.equal(rstd_x, wanted[2])


def test_image_tokens_pass_and_keep_their_statistics() -> None:
    x, k, v, weight = inputs(4)
    mask = torch.tensor([True, False, True, False])
    *statistics, out = forward(x, k, v, weight, mask)
    *wanted, plain = forward(x, k, v, weight)
    assert torch.equal(out[mask], x[mask])
    assert torch.equal(out[~mask], plain[~mask])
    for ours, theirs in zip(statistics, wanted, strict=True):
        assert torch.equal(ours[~mask], theirs[~mask])
        assert not ours[mask].any()


def test_the_output_is_rounded_once() -> None:
    x, k, v, weight = inputs(5, dtype=torch.bfloat16)
    dot, gate, *_, out = forward(x, k, v, weight)
    assert (dot.dtype, out.dtype) == (torch.float32, torch.bfloat16)
    assert torch.equal(out, (x.float() + gate[..., None] * v.float()[:, None]).bfloat16())


@pytest.mark.parametrize("mask", [None, [True, False, False, True, False]])
def test_the_gradients_equal_those_of_autograd(mask: Any) -> None:
    given = [t.requires_grad_() for t in inputs(5)]
    image = None if mask is None else torch.tensor(mask)
    *statistics, out = forward(*given, mask=image)
    grad_out = torch.randn(out.shape, generator=torch.Generator().manual_seed(9), dtype=F64)
    wanted = torch.autograd.grad(out, given, grad_out)
    detached = [t.detach() for t in (*given, *statistics)]
    *grads, partial = gate_bwd(grad_out, *detached, image, clamp_value=CLAMP, num_partials=3)
    assert partial.shape == (3, 4, 8)
    for ours, theirs in zip((*grads, partial.sum(0)), wanted, strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("mask", [None, [True, False, False]])
def test_the_gradients_equal_finite_differences(mask: Any) -> None:
    Gate.mask = None if mask is None else torch.tensor(mask)
    assert torch.autograd.gradcheck(Gate.apply, [t.requires_grad_() for t in inputs(3)])
    Gate.mask = None


def test_a_clamped_gate_has_no_gradient_of_its_own() -> None:
    x, k, v, weight = inputs(2)
    *statistics, out = forward(x, k, v, weight, clamp=100.0)
    grad = torch.ones_like(out)
    grad_x, grad_k, grad_v, partial = gate_bwd(grad, x, k, v, weight, *statistics, None, clamp_value=100.0, num_partials=1)
    assert torch.equal(grad_x, grad)
    assert not grad_k.any()
    assert not partial.any()
    torch.testing.assert_close(grad_v, (grad * statistics[1][..., None]).sum(1))


def test_partial_sums_are_those_of_every_nth_token() -> None:
    x, k, v, weight = inputs(5)
    *statistics, out = forward(x, k, v, weight)
    grad = torch.ones_like(out)
    three, five = (gate_bwd(grad, x, k, v, weight, *statistics, None, clamp_value=CLAMP, num_partials=n)[3] for n in (3, 5))
    torch.testing.assert_close(three, torch.stack((five[0] + five[3], five[1] + five[4], five[2])))


def test_no_tokens() -> None:
    x, k, v, weight = inputs(0)
    *statistics, out = forward(x, k, v, weight)
    assert out.shape == (0, 4, 8)
    *grads, partial = gate_bwd(out, x, k, v, weight, *statistics, None, clamp_value=CLAMP, num_partials=0)
    assert [t.shape for t in grads] == [x.shape, k.shape, v.shape]
    assert partial.shape == (0, 4, 8)

"""What stands before a layer and before the head, on a GPU: against autograd of the same in float64, and without gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from gpu_checks import on_gpu_with, same

from tkbuild import reference
from tkbuild.errors import ArgumentError
from tkbuild.ops.modeling.mhc import expand_from_embedding, mhc_head, mhc_post, mhc_pre
from tkbuild.runtime.launcher import native

pytestmark = on_gpu_with(
    "mhc.pre_norm_fn_mul",
    "mhc.pre_norm_fn_mul_bwd",
    "mhc.reduce_partials_and_rmsnorm",
    "mhc.post",
    "mhc.pre_apply_mix",
    "mhc.pre_split_mixes",
    "mhc.head_compute_mix",
)

BF16, F32 = torch.bfloat16, torch.float32
EPS = 1e-6
Tensors = list[torch.Tensor]


def random(*shape: int, dtype: torch.dtype = F32) -> torch.Tensor:
    return torch.randn(shape, device="cuda").to(dtype)


def parameters(columns: int, rows: int) -> Tensors:
    """fn, scale, base and norm weight of a layer (24 rows) or of the head (4)."""
    width = 4 * columns
    return [random(rows, width) / width**0.5, random(3 if rows == 24 else 1), random(rows), random(width) * 0.1 + 1]


class Rounded(torch.autograd.Function):
    """A float64 tensor rounded to bfloat16, where a layer hands it on; so is its gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.to(BF16).double()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad.to(BF16).double()


def rounded(x: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = Rounded.apply(x)  # type: ignore[no-untyped-call]
    return result


def wide_mixes(residual: torch.Tensor, fn: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    x = residual.flatten(-2)
    return (x @ (fn * weight).T) * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS)


def wide_block(embedding: torch.Tensor, tensors: Tensors) -> torch.Tensor:
    """``block`` in float64 but for the tensors between its layers."""
    fn, scale, base, weight, head_fn, head_scale, head_base, head_weight = tensors
    copies = embedding[..., None, :].expand(*embedding.shape[:-1], 4, -1)
    residual = rounded(copies * torch.arange(1, 5, device="cuda")[:, None] / 4)
    mixes = wide_mixes(residual, fn, weight)
    pre, post, comb = (m * s + b for m, s, b in zip(mixes.split((4, 4, 16), -1), scale, base.split((4, 4, 16)), strict=True))
    pre, post = torch.sigmoid(pre) + EPS, torch.sigmoid(post) * 2
    comb = reference.mhc.sinkhorn(comb.reshape(-1, 4, 4), repeat=10, eps=EPS).view(*residual.shape[:-2], 4, 4)
    output = rounded(torch.tanh(rounded((pre[..., None] * residual).sum(-2))))
    streams = rounded(post[..., None] * output[..., None, :] + comb.transpose(-1, -2) @ residual)
    mix = torch.sigmoid(wide_mixes(streams, head_fn, head_weight) * head_scale + head_base) + EPS
    return rounded((mix[..., None] * streams).sum(-2))


def block(embedding: torch.Tensor, tensors: Tensors) -> torch.Tensor:
    """An embedding through a layer to the head."""
    fn, scale, base, weight, head_fn, head_scale, head_base, head_weight = tensors
    factors = (torch.arange(1, 5, device="cuda", dtype=BF16) / 4)[:, None]
    residual = expand_from_embedding(embedding) * factors
    layer_input, (post, comb) = mhc_pre(residual, fn, scale, base, norm_weight=weight, post_mult_value=2.0)
    streams = mhc_post(torch.tanh(layer_input), residual, post, comb)
    return mhc_head(streams, head_fn, head_scale, head_base, norm_weight=head_weight)


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    """Sum of squared differences over the sum of squares."""
    a, b = a.detach().double(), b.detach().double()
    return float((a - b).square().sum() / (a.square() + b.square()).sum())


@pytest.mark.parametrize(("lead", "columns"), [((2, 33), 64), ((1, 512), 1280), ((2, 1024), 2560)])
def test_a_block_against_autograd(lead: tuple[int, ...], columns: int) -> None:
    embedding, tensors = random(*lead, columns, dtype=BF16), [*parameters(columns, 24), *parameters(columns, 4)]
    ours = [t.clone().requires_grad_() for t in (embedding, *tensors)]
    theirs = [t.double().requires_grad_() for t in (embedding, *tensors)]
    out, wanted = block(ours[0], ours[1:]), wide_block(theirs[0], theirs[1:])
    assert relative(out, wanted) < 1e-4
    grad = random(*out.shape)
    out.backward(grad.to(BF16))
    wanted.backward(grad.to(BF16).double())
    for got, want in zip(ours, theirs, strict=True):
        assert got.grad is not None
        assert got.grad.dtype == got.dtype
        assert want.grad is not None
        assert relative(got.grad, want.grad) < 1e-3


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("with_weight", [False, True])
def test_inference_gives_the_same_bits_in_fewer_launches(mode: Callable[[], Any], with_weight: bool) -> None:
    residual, (fn, scale, base, weight) = random(2, 65, 4, 1280, dtype=BF16), parameters(1280, 24)
    keywords: dict[str, Any] = {"norm_weight": weight if with_weight else None, "post_mult_value": 2.0, "sinkhorn_repeat": 20}
    layer_input, (post, comb) = mhc_pre(residual, fn, scale, base, **keywords)
    before = native().launch_count()
    with mode():
        got_input, (got_post, got_comb) = mhc_pre(residual, fn, scale, base, **keywords)
    assert native().launch_count() == before + 2 + with_weight
    assert same(got_input, layer_input)
    assert same(got_post, post)
    assert same(got_comb, comb)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's own modules, while it traces
def test_a_block_under_compile() -> None:
    embedding, tensors = random(2, 40, 128, dtype=BF16), [*parameters(128, 24), *parameters(128, 4)]
    results = []
    for function in (torch.compile(block, backend="aot_eager", fullgraph=True), block):
        given = [t.clone().requires_grad_() for t in (embedding, *tensors)]
        out = function(given[0], given[1:])
        out.float().square().sum().backward()
        results.append([out, *(t.grad for t in given)])
    for ours, theirs in zip(*results, strict=True):
        assert relative(ours, theirs) < 1e-4


@pytest.mark.parametrize("place", range(9))
def test_each_gradient_alone(place: int) -> None:
    embedding, tensors = random(40, 64, dtype=BF16), [*parameters(64, 24), *parameters(64, 4)]
    whole = [t.clone().requires_grad_() for t in (embedding, *tensors)]
    single = [t.clone().requires_grad_(index == place) for index, t in enumerate((embedding, *tensors))]
    for given in (whole, single):
        block(given[0], given[1:]).float().square().sum().backward()
    assert [index for index, t in enumerate(single) if t.grad is not None] == [place]
    assert relative(single[place].grad, whole[place].grad) < 1e-4


def test_no_tokens() -> None:
    tensors = [t.requires_grad_() for t in (*parameters(64, 24), *parameters(64, 4))]
    out = block(random(0, 64, dtype=BF16), tensors)
    assert out.shape == (0, 64)
    out.float().sum().backward()
    for tensor in tensors:
        assert tensor.grad is not None
        assert not tensor.grad.any()


def test_refusals_launch_nothing() -> None:
    residual, (fn, scale, base, _) = random(5, 4, 64, dtype=BF16), parameters(64, 24)
    before = native().launch_count()
    for call in (
        lambda: mhc_pre(residual, fn, scale, base, mhc_mult=2),
        lambda: mhc_pre(residual[:, :2], fn, scale, base),
        lambda: mhc_pre(residual, fn[:4], scale, base),
        lambda: mhc_head(residual, fn, scale[:1], base[:4]),
        lambda: mhc_head(residual, fn[:4], scale[:1], base[:4], mhc_mult=8),
    ):
        with pytest.raises(ArgumentError):
            call()
    assert native().launch_count() == before

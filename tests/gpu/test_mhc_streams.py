"""Expand, post and pre_apply_mix on a GPU: against the references, on layouts, gradients and refusals that the contract names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from gpu_checks import on_gpu_with, opcheck, same, same_with_programmatic_launches

from tkbuild import ops
from tkbuild.errors import ArgumentError, NoVariantError
from tkbuild.ops.modeling import mhc as layers
from tkbuild.reference import mhc as reference
from tkbuild.runtime.launcher import native

pytestmark = on_gpu_with("mhc.expand_to_mhc", "mhc.post", "mhc.pre_apply_mix")

BF16, F32 = torch.bfloat16, torch.float32
SHAPES = [(1, 1280), (33, 2560), (257, 264), (130, 7168), (0, 1280)]


def random(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.randn(shape, device="cuda").to(dtype)


def apart(*shape: int) -> torch.Tensor:
    """A tensor of ``shape`` whose rows lie apart."""
    return random(*shape[:-1], shape[-1] + 8)[..., : shape[-1]]


def mixes(*lead: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Pre, post and comb as the layers give them."""
    return tuple(torch.rand((*lead, 4, last), device="cuda") for last in (1, 1, 4))  # type: ignore[return-value]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("m", [1, 2, 3, 4, 8])
def test_expand(shape: tuple[int, int], m: int) -> None:
    x, out = apart(*shape), torch.empty(shape[0], m, shape[1], dtype=BF16, device="cuda")
    assert ops.mhc.expand_to_mhc_fwd(x, out) is None
    assert same(out, reference.expand_to_mhc(x, m=m))
    grad = random(shape[0], m + 1, shape[1] + 8)[:, :m, : shape[1]]
    x_grad = torch.empty(shape, dtype=BF16, device="cuda")
    ops.mhc.expand_to_mhc_bwd(grad, x_grad)
    assert same(x_grad, reference.expand_to_mhc_bwd(grad))


@pytest.mark.parametrize("shape", SHAPES)
def test_post(shape: tuple[int, int]) -> None:
    n, h = shape
    _, post, comb = mixes(2, n)
    x, residual, d_o = random(2, n, h), random(2, n, 4, h), random(2, n, 4, h) * 0.05
    flat = x.view(-1, h), residual.view(-1, 4, h), post.view(-1, 4), comb.view(-1, 4, 4)
    wanted = reference.post(*flat).view(residual.shape)
    assert same(ops.mhc.mhc_post_fwd(x, residual, post, comb), wanted)
    out = torch.empty_like(residual)
    assert ops.mhc.mhc_post_fwd(x, residual.mT.contiguous().mT, post, comb, out) is out
    assert same(out, wanted)
    found = ops.mhc.mhc_post_bwd(x, residual, post, comb, d_o)
    expected = reference.post_bwd(*flat, d_o.view(-1, 4, h))
    for one, other, like in zip(found, expected, (x, residual, post, comb), strict=True):
        assert one.shape == like.shape
        if one.dtype == BF16:
            assert same(one, other.view(like.shape))
        else:
            torch.testing.assert_close(one, other.view(like.shape))
    again = ops.mhc.mhc_post_bwd(x, residual, post, comb, d_o)
    assert all(same(a, b) for a, b in zip(found, again, strict=True))


def test_post_of_rows_apart() -> None:
    x, residual, (_, post, comb) = apart(67, 1280), random(67, 4, 1280), mixes(67)
    assert same(ops.mhc.mhc_post_fwd(x, residual, post, comb), reference.post(x, residual, post.squeeze(-1), comb))


@pytest.mark.parametrize("shape", SHAPES)
def test_pre_apply_mix(shape: tuple[int, int]) -> None:
    n, h = shape
    x, mix, out = random(n, 4, h), mixes(n)[0], torch.empty(shape, dtype=BF16, device="cuda")
    assert ops.mhc.mhc_pre_apply_mix_fwd(x, mix, out) is None
    assert same(out, reference.pre_apply_mix(x, mix.squeeze(-1)))
    grad, x_grad = apart(n, h), random(n, 4, h)
    wanted, wanted_mix = reference.pre_apply_mix_bwd(grad, x, mix.squeeze(-1), x_grad.clone())
    mix_grad = ops.mhc.mhc_pre_apply_mix_bwd(grad, x, mix, x_grad)
    assert same(x_grad, wanted)
    assert mix_grad.shape == mix.shape
    torch.testing.assert_close(mix_grad.squeeze(-1), wanted_mix, rtol=1e-5, atol=1e-3)
    assert same(mix_grad, ops.mhc.mhc_pre_apply_mix_bwd(grad, x, mix, x_grad))


def plain_apply(x: torch.Tensor, mix: torch.Tensor) -> torch.Tensor:
    return reference.pre_apply_mix(x.flatten(0, -3), mix.flatten(0, -3).squeeze(-1)).view(*x.shape[:-2], x.shape[-1])


def plain_post(x: torch.Tensor, residual: torch.Tensor, post: torch.Tensor, comb: torch.Tensor) -> torch.Tensor:
    flat = x.flatten(0, -2), residual.flatten(0, -3), post.flatten(0, -3).squeeze(-1), comb.flatten(0, -3)
    return reference.post(*flat).view(residual.shape)


def plain_expand(x: torch.Tensor) -> torch.Tensor:
    return reference.expand_to_mhc(x.flatten(0, -2), m=4).view(*x.shape[:-1], 4, x.shape[-1])


LAYERS: dict[str, tuple[Callable[..., Any], Callable[..., Any], Callable[[], tuple[torch.Tensor, ...]]]] = {
    "expand": (layers.expand_from_embedding, plain_expand, lambda: (random(2, 33, 1280),)),
    "post": (layers.mhc_post, plain_post, lambda: (random(2, 33, 1280), random(2, 33, 4, 1280), *mixes(2, 33)[1:])),
    "apply": (layers.mhc_pre_apply_mix, plain_apply, lambda: (random(2, 33, 4, 1280), mixes(2, 33)[0])),
}
SUBSETS = [("expand", (True,)), *(("apply", (bool(i & 1), bool(i & 2))) for i in range(1, 4))]
SUBSETS += [("post", tuple(bool(i >> j & 1) for j in range(4))) for i in range(1, 16)]


def close(found: torch.Tensor | None, expected: torch.Tensor | None) -> None:
    """Equal to the rounding of a bfloat16, of sums in float32."""
    assert found is not None and expected is not None
    scale = float(expected.abs().max())
    torch.testing.assert_close(found.double(), expected, rtol=1e-2 if found.dtype == BF16 else 1e-4, atol=1e-3 * scale)


@pytest.mark.parametrize(("name", "needed"), SUBSETS)
def test_layers_against_autograd_of_the_reference(name: str, needed: tuple[bool, ...]) -> None:
    layer, plain, make = LAYERS[name]
    given = [t.requires_grad_(need) for t, need in zip(make(), needed, strict=True)]
    exact = [t.detach().double().requires_grad_(need) for t, need in zip(given, needed, strict=True)]
    y, z = layer(*given), plain(*exact)
    grad = random(*y.shape)
    y.backward(grad)
    z.backward(grad.double())
    close(y.detach(), z.detach())
    for one, other, need in zip(given, exact, needed, strict=True):
        if need:
            close(one.grad, other.grad)
        else:
            assert one.grad is None


def layer_of_a_model(residual: torch.Tensor, factors: tuple[torch.Tensor, ...], apply: Any, post: Any, also: bool) -> torch.Tensor:
    pre, post_mix, comb = factors
    x = apply(residual, pre)
    out = post(x * 2, residual, post_mix, comb)
    return out.float().sum() + (residual.float().square().sum() if also else 0)


@pytest.mark.parametrize("also", [False, True])
def test_the_gradient_of_a_shared_residual(also: bool) -> None:
    start, factors = random(2, 65, 4, 2560), mixes(2, 65)
    ours, theirs = start.clone().requires_grad_(), start.double().requires_grad_()
    layer_of_a_model(ours * 1, factors, layers.mhc_pre_apply_mix, layers.mhc_post, also).backward()
    layer_of_a_model(theirs * 1, tuple(t.double() for t in factors), plain_apply, plain_post, also).backward()
    torch.testing.assert_close(ours.grad.double(), theirs.grad, rtol=2e-2, atol=5e-2)


def test_without_gradients_and_into_given_outputs() -> None:
    x, residual, (pre, post, comb) = random(2, 9, 1280), random(2, 9, 4, 1280), mixes(2, 9)
    calls: list[Callable[..., torch.Tensor]] = [
        lambda **k: layers.expand_to_mhc(x, 4, **k),
        lambda **k: layers.mhc_post(x, residual, post, comb, **k),
        lambda **k: layers.mhc_pre_apply_mix(residual, pre, **k),
    ]
    x.requires_grad_()
    pre.requires_grad_()
    for call in calls:
        wanted = call()
        for mode in (torch.no_grad(), torch.inference_mode()):
            with mode:
                assert same(call(), wanted.detach())
                out = torch.empty_like(wanted)
                assert call(out=out) is out
                assert same(out, wanted.detach())
        out = torch.empty_like(wanted, requires_grad=False)
        call(out=out).sum().backward()
    assert x.grad is not None and pre.grad is not None


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's own modules, when they are first imported
def test_compiled_without_a_graph_break() -> None:
    def model(x: torch.Tensor, pre: torch.Tensor, post: torch.Tensor, comb: torch.Tensor) -> torch.Tensor:
        residual = layers.expand_from_embedding(x)
        return layers.mhc_post(layers.mhc_pre_apply_mix(residual, pre) * 2, residual, post, comb)

    def gradients(function: Any) -> list[torch.Tensor]:
        y = function(*given)
        return [y.detach(), *torch.autograd.grad(y.float().sum(), given)]

    given = [t.requires_grad_() for t in (random(2, 33, 1280), *mixes(2, 33))]
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for found, expected in zip(gradients(compiled), gradients(model), strict=True):
        torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)


X, R = (64, 512), (64, 4, 512)


@pytest.mark.parametrize(
    "call",
    [
        lambda o, x, r, p, c: o.expand_to_mhc_fwd(x, r[:, :, :256]),
        lambda o, x, r, p, c: o.expand_to_mhc_fwd(x, r[:32]),
        lambda o, x, r, p, c: o.expand_to_mhc_fwd(x.float(), r),
        lambda o, x, r, p, c: o.expand_to_mhc_fwd(x[:, :500], r[:, :, :500].contiguous()),
        lambda o, x, r, p, c: o.expand_to_mhc_fwd(x.cpu(), r),
        lambda o, x, r, p, c: o.expand_to_mhc_bwd(r, x[:, :256]),
        lambda o, x, r, p, c: o.expand_to_mhc_bwd(x, x),
        lambda o, x, r, p, c: o.mhc_post_fwd(x[:32], r, p, c),
        lambda o, x, r, p, c: o.mhc_post_fwd(x, r[:, :2], p, c),
        lambda o, x, r, p, c: o.mhc_post_fwd(x, r, p.bfloat16(), c),
        lambda o, x, r, p, c: o.mhc_post_fwd(x, r, p, c.flatten(1)),
        lambda o, x, r, p, c: o.mhc_post_fwd(x, r, p, c, r[:32]),
        lambda o, x, r, p, c: o.mhc_post_bwd(x, r, p, c, r[:, :, :256]),
        lambda o, x, r, p, c: o.mhc_post_bwd(x, r, p, c.cpu(), r),
        lambda o, x, r, p, c: o.mhc_post_bwd(x[:, :0].clone(), r[:, :, :0].clone(), p, c, r[:, :, :0].clone()),
        lambda o, x, r, p, c: o.mhc_pre_apply_mix_fwd(r, c, x),
        lambda o, x, r, p, c: o.mhc_pre_apply_mix_fwd(r, p[:32], x),
        lambda o, x, r, p, c: o.mhc_pre_apply_mix_fwd(r.mT.contiguous().mT, p, x),
        lambda o, x, r, p, c: o.mhc_pre_apply_mix_bwd(x, r, p, r.float()),
        lambda o, x, r, p, c: o.mhc_pre_apply_mix_bwd(x[:, :256], r, p, r.clone()),
    ],
)
def test_refusals_launch_nothing(call: Any) -> None:
    tensors = random(*X), random(*R), torch.rand(64, 4, 1, device="cuda"), torch.rand(64, 4, 4, device="cuda")
    before = native().launch_count()
    with pytest.raises((ArgumentError, NoVariantError)):
        call(ops.mhc, *tensors)
    assert native().launch_count() == before


def test_no_tokens_launch_nothing() -> None:
    x, residual, (pre, post, comb) = random(2, 0, 1280), random(2, 0, 4, 1280), mixes(2, 0)
    before = native().launch_count()
    assert layers.expand_to_mhc(x, 4).shape == layers.mhc_post(x, residual, post, comb).shape == residual.shape
    assert layers.mhc_pre_apply_mix(residual, pre).shape == x.shape
    assert [t.shape[1] for t in ops.mhc.mhc_post_bwd(x, residual, post, comb, residual)] == [0] * 4
    assert native().launch_count() == before


def test_programmatic_launch_gives_the_same_results() -> None:
    x, (pre, post, comb) = random(2, 1024, 2560), mixes(2, 1024)

    def chain() -> list[torch.Tensor]:
        residual = layers.expand_to_mhc(x, 4)
        out = layers.mhc_post(layers.mhc_pre_apply_mix(residual, pre), residual, post, comb)
        return [out, *ops.mhc.mhc_post_bwd(x, residual, post, comb, out)]

    assert same_with_programmatic_launches(chain)


def test_opcheck() -> None:
    x, residual, mix, comb = random(5, 512), random(5, 4, 512), torch.rand(5, 4, device="cuda"), torch.rand(5, 4, 4, device="cuda")
    op = torch.ops.tkbuild
    opcheck(op.mhc_expand_to_mhc, (x,), {"m": 4})
    opcheck(op.mhc_expand_to_mhc_bwd, (residual,))
    opcheck(op.mhc_post, (x, residual, mix, comb))
    opcheck(op.mhc_post_bwd, (x, residual, mix, comb, residual.clone()))
    opcheck(op.mhc_pre_apply_mix, (residual, mix))
    opcheck(op.mhc_pre_apply_mix_bwd, (x, residual, mix, residual.clone()), {"accumulate": 1})
    opcheck(op.mhc_pre_apply_mix_bwd, (x, residual, mix, None), {"accumulate": 0})
    x, residual, mix, comb = (tensor.requires_grad_() for tensor in (x, residual, mix, comb))
    opcheck(op.mhc_expand_to_mhc, (x,), {"m": 4})
    opcheck(op.mhc_post, (x, residual, mix, comb))
    opcheck(op.mhc_pre_apply_mix, (residual, mix))

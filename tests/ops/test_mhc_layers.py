"""The hyper-connection layers without a GPU: references stand in for the kernels, so that what autograd is told can be checked."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from tkbuild.errors import ArgumentError
from tkbuild.ops.modeling import mhc as layers
from tkbuild.ops.modeling.mhc import apply_mix, expand, gradient_sharing, gradients, mixes, post
from tkbuild.reference import mhc as reference

M, H = 4, 16
BF16 = torch.bfloat16


class StandIn:
    """A kernel's op, computed by its reference: fills given outputs and writes what the kernel would write in place."""

    def __init__(
        self, function: Callable[..., Any], names: tuple[str, ...] = (), inout: tuple[int, ...] = (), workspaces: int = 0
    ) -> None:
        self.function, self.names, self.inout, self.workspaces = function, names, inout, workspaces
        self.calls = 0

    def __call__(self, tensors: Any, static: Any = (), scalars: Any = (), outs: Any = None) -> Any:
        self.calls += 1
        given = tensors[: len(tensors) - self.workspaces]
        results = self.function(*given, **dict(zip(self.names, scalars, strict=True)))
        results = results if isinstance(results, tuple) else (results,)
        places = [place for place in self.inout if tensors[place] is not None]
        for place, result in zip(places, results, strict=False):
            tensors[place].copy_(result)
        results = results[len(places) :]
        if outs is not None:
            for out, result in zip(outs, results, strict=True):
                out.copy_(result)
            results = outs
        return results[0] if len(results) == 1 else results


@pytest.fixture(autouse=True)
def kernels(monkeypatch: pytest.MonkeyPatch) -> dict[str, StandIn]:
    found = {
        "expand": StandIn(reference.expand_to_mhc, ("m",)),
        "expand_bwd": StandIn(reference.expand_to_mhc_bwd),
        "head": StandIn(reference.head_compute_mix, ("mhc_pre_eps",)),
        "head_bwd": StandIn(reference.head_compute_mix_bwd, (), inout=(4, 5)),
        "split": StandIn(reference.pre_split_mixes, ("mhc_post_mult_value", "mhc_pre_eps")),
        "split_bwd": StandIn(reference.pre_split_mixes_bwd, ("num_partials", "mhc_post_mult_value"), workspaces=1),
        "post": StandIn(reference.post),
        "post_bwd": StandIn(reference.post_bwd),
        "apply": StandIn(reference.pre_apply_mix),
        "apply_bwd": StandIn(reference.pre_apply_mix_bwd, ("accumulate",), inout=(3,)),
    }
    for module, names in ((expand, ("expand",)), (mixes, ("head", "split")), (post, ("post",)), (apply_mix, ("apply",))):
        for name in names:
            monkeypatch.setattr(module, f"_{name}", found[name])
            monkeypatch.setattr(module, f"_{name}_bwd", found[f"{name}_bwd"])
    return found


def random(*shape: int, dtype: torch.dtype = BF16, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(dtype)


def mixes_for(*lead: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Pre, post and comb."""
    return tuple(random(*lead, M, last, dtype=torch.float32, seed=last) for last in (1, 1, M))  # type: ignore[return-value]


def plain_apply(x: torch.Tensor, mix: torch.Tensor) -> torch.Tensor:
    return (x.double() * mix.double()).sum(-2)


def plain_post(x: torch.Tensor, residual: torch.Tensor, post_mix: torch.Tensor, comb: torch.Tensor) -> torch.Tensor:
    return x.double().unsqueeze(-2) * post_mix.double() + comb.double().mT @ residual.double()


def leaves(*tensors: torch.Tensor) -> list[torch.Tensor]:
    return [t.detach().clone().requires_grad_() for t in tensors]


def close(found: torch.Tensor | None, expected: torch.Tensor | None) -> None:
    assert found is not None and expected is not None
    torch.testing.assert_close(found.float(), expected.float(), rtol=2e-2, atol=2e-2)


CALLS: dict[str, tuple[Callable[..., Any], Callable[..., Any], Callable[[], tuple[torch.Tensor, ...]]]] = {
    "expand": (
        lambda x: layers.expand_to_mhc(x, M),
        lambda x: x.unsqueeze(-2).expand(*x.shape[:-1], M, H),
        lambda: (random(2, 3, H),),
    ),
    "embedding": (layers.expand_from_embedding, lambda x: x.unsqueeze(-2).expand(*x.shape[:-1], M, H), lambda: (random(2, 3, H),)),
    "head": (
        lambda x, s, b: layers.mhc_head_compute_mix(x, s, b, 1e-2),
        lambda x, s, b: torch.sigmoid(x * s + b) + 1e-2,
        lambda: (random(2, 3, M, dtype=torch.float32), random(1, dtype=torch.float32), random(M, dtype=torch.float32)),
    ),
    "post": (layers.mhc_post, plain_post, lambda: (random(2, 3, H), random(2, 3, M, H), *mixes_for(2, 3)[1:])),
    "apply": (layers.mhc_pre_apply_mix, plain_apply, lambda: (random(2, 3, M, H), mixes_for(2, 3)[0])),
}


@pytest.mark.parametrize(("name", "needed"), [(name, bits) for name in CALLS for bits in range(1 << len(CALLS[name][2]()))])
def test_gradients_of_any_subset(name: str, needed: int) -> None:
    layer, plain, make = CALLS[name]
    tensors = make()
    wanted = [bool(needed >> i & 1) for i in range(len(tensors))]
    ours, theirs = ([t.requires_grad_(need) for t, need in zip(leaves(*tensors), wanted, strict=True)] for _ in range(2))
    y, z = layer(*ours), plain(*theirs)
    assert y.shape == z.shape
    assert y.requires_grad == any(wanted)
    close(y.detach(), z.detach())
    if not any(wanted):
        return
    grad = random(*y.shape, dtype=y.dtype, seed=5)
    y.backward(grad)
    z.backward(grad.to(z.dtype))
    for one, other, need in zip(ours, theirs, wanted, strict=True):
        if need:
            close(one.grad, other.grad)
        else:
            assert one.grad is None


#: An op of ``torch.ops``: its schema, what computes it, a layer that computes the same, and the op's keywords.
OPS: dict[str, tuple[str, Callable[..., Any], Callable[..., Any], dict[str, Any], Callable[[], tuple[torch.Tensor, ...]]]] = {
    "mhc_expand_to_mhc": (
        "(Tensor x, *, int m) -> Tensor",
        reference.expand_to_mhc,
        lambda x: layers.expand_to_mhc(x, M),
        {"m": M},
        lambda: (random(6, H),),
    ),
    "mhc_head_compute_mix": (
        "(Tensor x, Tensor scale, Tensor base, *, float mhc_pre_eps) -> Tensor",
        reference.head_compute_mix,
        lambda *given: layers.mhc_head_compute_mix(*given, 1e-2),
        {"mhc_pre_eps": 1e-2},
        lambda: (random(6, M, dtype=torch.float32), random(1, dtype=torch.float32), random(M, dtype=torch.float32)),
    ),
    "mhc_post": (
        "(Tensor x, Tensor residual, Tensor post, Tensor comb) -> Tensor",
        reference.post,
        layers.mhc_post,
        {},
        lambda: (random(6, H), random(6, M, H), mixes_for(6)[1].squeeze(-1), mixes_for(6)[2]),
    ),
    "mhc_pre_apply_mix": (
        "(Tensor x, Tensor mix) -> Tensor",
        reference.pre_apply_mix,
        layers.mhc_pre_apply_mix,
        {},
        lambda: (random(6, M, H), mixes_for(6)[0].squeeze(-1)),
    ),
    "mhc_pre_split_mixes": (
        "(Tensor mixes, Tensor scale, Tensor base, *, float mhc_post_mult_value, float mhc_pre_eps) -> (Tensor, Tensor, Tensor)",
        reference.pre_split_mixes,
        lambda *given: layers.mhc_pre_split_mixes(*given, M, 2.0, 1e-2),
        {"mhc_post_mult_value": 2.0, "mhc_pre_eps": 1e-2},
        lambda: (random(6, 24, dtype=torch.float32), random(3, dtype=torch.float32), random(24, dtype=torch.float32)),
    ),
}


@pytest.mark.parametrize(("name", "needed"), [(name, bits) for name in OPS for bits in range(1, 1 << len(OPS[name][4]()))])
def test_gradients_of_ops_are_those_of_the_layers(name: str, needed: int) -> None:
    schema, function, layer, keywords, make = OPS[name]
    wanted = [bool(needed >> i & 1) for i in range(len(make()))]
    ours, theirs = ([t.requires_grad_(need) for t, need in zip(leaves(*make()), wanted, strict=True)] for _ in range(2))
    with torch.library._scoped_library("tkbuild_test", "FRAGMENT") as library:
        library.define(f"{name}{schema}")
        library.impl(name, lambda *given, **values: function(*given, **values), "CPU")
        gradient = gradients._GRADIENTS[name]
        torch.library.register_autograd(f"tkbuild_test::{name}", gradient.backward, setup_context=gradient.save, lib=library)
        found = getattr(torch.ops.tkbuild_test, name)(*ours, **keywords)
    expected = layer(*theirs)
    for results in (found, expected):
        first = results[0] if isinstance(results, tuple) else results
        first.backward(random(first.numel(), dtype=first.dtype).view(first.shape))
    for one, other, need in zip(ours, theirs, wanted, strict=True):
        assert (one.grad is not None) == need
        if need:
            assert one.grad.shape == one.shape
            close(one.grad, other.grad)
    if name == "mhc_post":
        assert not hasattr(ours[1].untyped_storage(), "grad_from_mhc_post")


@pytest.mark.parametrize("needed", range(1, 8))
@pytest.mark.parametrize("used", [(0,), (1,), (2,), (0, 1, 2)])
def test_gradients_of_split_mixes(needed: int, used: tuple[int, ...]) -> None:
    tensors = (random(2, 3, 24, dtype=torch.float32), random(3, dtype=torch.float32), random(24, dtype=torch.float32))
    wanted = [bool(needed >> i & 1) for i in range(3)]
    ours, theirs = ([t.requires_grad_(need) for t, need in zip(leaves(*tensors), wanted, strict=True)] for _ in range(2))
    found = layers.mhc_pre_split_mixes(*ours, M, 2.0, 1e-2)
    assert [tuple(t.shape) for t in found] == [(2, 3, M, 1), (2, 3, M, 1), (2, 3, M, M)]
    x, scale, base = theirs
    pre, post_mix, comb = (x[..., a:b] * scale[i] + base[a:b] for i, (a, b) in enumerate(((0, 4), (4, 8), (8, 24))))
    expected = torch.sigmoid(pre) + 1e-2, torch.sigmoid(post_mix) * 2.0, comb
    for one, other in zip(found, expected, strict=True):
        close(one.detach().flatten(), other.detach().flatten())
    sum((found[i].flatten() * random(found[i].numel(), dtype=torch.float32)).sum() for i in used).backward()
    sum((expected[i].flatten() * random(expected[i].numel(), dtype=torch.float32)).sum() for i in used).backward()
    for one, other in zip(ours, theirs, strict=True):
        if one.requires_grad:
            close(one.grad, other.grad)


def test_no_tokens() -> None:
    scale, base, scales, bases = (random(n, dtype=torch.float32).requires_grad_() for n in (1, M, 3, 24))
    layers.mhc_head_compute_mix(torch.empty(0, M), scale, base, 1e-2).sum().backward()
    assert scale.grad.tolist() == [0.0]
    assert base.grad.tolist() == [0.0] * M
    results = layers.mhc_pre_split_mixes(torch.empty(2, 0, 24), scales, bases, M, 2.0, 1e-2)
    sum(t.sum() for t in results).backward()
    assert scales.grad.tolist() == [0.0] * 3
    assert bases.grad.tolist() == [0.0] * 24
    assert layers.expand_to_mhc(torch.empty(0, H, dtype=BF16), M).shape == (0, M, H)


def test_inference_and_no_grad() -> None:
    x, residual = random(2, 3, H).requires_grad_(), random(2, 3, M, H).requires_grad_()
    pre, post_mix, comb = mixes_for(2, 3)
    for mode in (torch.no_grad(), torch.inference_mode()):
        with mode:
            assert not layers.expand_to_mhc(x, M).requires_grad
            assert not layers.mhc_pre_apply_mix(residual, pre).requires_grad
            assert not layers.mhc_post(x, residual, post_mix, comb).requires_grad


@pytest.mark.parametrize("with_grad", [False, True])
def test_given_outputs(with_grad: bool) -> None:
    x, residual = random(2, 3, H).requires_grad_(with_grad), random(2, 3, M, H)
    pre, post_mix, comb = mixes_for(2, 3)
    pre.requires_grad_(with_grad)
    for layer, shape in (
        (lambda out: layers.expand_to_mhc(x, M, out), (2, 3, M, H)),
        (lambda out: layers.mhc_post(x, residual, post_mix, comb, out), (2, 3, M, H)),
        (lambda out: layers.mhc_pre_apply_mix(residual, pre, out), (2, 3, H)),
    ):
        out = torch.zeros(shape, dtype=BF16)
        result = layer(out)
        assert result is out
        assert out.requires_grad == with_grad
        assert torch.equal(out.detach(), layer(None).detach())
        if with_grad:
            result.sum().backward()
    assert (x.grad is not None) == (pre.grad is not None) == with_grad


def given_output(name: str, x: torch.Tensor, residual: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    pre, post_mix, comb = mixes_for(2, 3)
    call: Callable[[], torch.Tensor] = {
        "expand": lambda: layers.expand_to_mhc(x, M, out),
        "post": lambda: layers.mhc_post(x, residual, post_mix, comb, out),
        "apply": lambda: layers.mhc_pre_apply_mix(residual, pre, out),
    }[name]
    return call()


@pytest.mark.parametrize("name", ["expand", "post", "apply"])
def test_gradients_through_an_output_that_is_a_view(name: str) -> None:
    shape = (2, 3, H) if name == "apply" else (2, 3, M, H)
    grads, buffer = [], torch.zeros(2, *shape, dtype=BF16)
    for out in (torch.zeros(shape, dtype=BF16), buffer[1]):
        x, residual = leaves(random(2, 3, H), random(2, 3, M, H))
        given_output(name, x, residual, out).float().square().sum().backward()
        grads.append([t.grad for t in (x, residual) if t.grad is not None])
    assert len(grads[0]) == len(grads[1]) == (2 if name == "post" else 1)
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))
    assert torch.count_nonzero(buffer[0]) == 0
    assert torch.count_nonzero(buffer[1]) > 0


@pytest.mark.parametrize("name", ["expand", "post", "apply"])
def test_an_output_on_an_input_is_refused_where_gradients_are_needed(name: str) -> None:
    whole = random(2, 3, M, H)
    x, residual = whole.view(-1)[: 2 * 3 * H].view(2, 3, H).requires_grad_(), whole
    with pytest.raises(ArgumentError, match="out shares memory with an input"):
        given_output(name, x, residual.requires_grad_(), whole.detach() if name != "apply" else x.detach())


def test_checkpoints_and_what_is_saved_once() -> None:
    x, residual = leaves(random(2, 3, H), random(2, 3, M, H))
    _, post_mix, comb = mixes_for(2, 3)
    out = checkpoint(lambda *t: layers.mhc_post(*t, post_mix, comb), x, residual, use_reentrant=False)
    out.float().sum().backward()
    assert x.grad is not None
    assert residual.grad is not None


def test_inputs_that_are_not_contiguous() -> None:
    x, residual = random(2, H, 3).mT, random(2, 3, H, M).mT
    pre, post_mix, comb = mixes_for(2, 3)
    close(layers.mhc_post(x, residual, post_mix, comb.mT), plain_post(x, residual, post_mix, comb.mT))
    close(layers.mhc_pre_apply_mix(residual, pre), plain_apply(residual, pre))


def test_second_derivatives_are_refused() -> None:
    x = random(2, H).requires_grad_()
    (grad,) = torch.autograd.grad(layers.expand_to_mhc(x, M).float().square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


@pytest.mark.parametrize(
    "call",
    [
        lambda: layers.mhc_pre_split_mixes(torch.zeros(2, 24), torch.ones(3), torch.zeros(24), 2, 1.0, 0.0),
        lambda: layers.mhc_pre_split_mixes(torch.zeros(2, 12), torch.ones(3), torch.zeros(24), M, 1.0, 0.0),
        lambda: layers.mhc_head_compute_mix(torch.zeros(2, 8), torch.ones(1), torch.zeros(4), 0.0),
        lambda: layers.mhc_post(random(2, H), random(2, M, H), torch.zeros(2, M), torch.zeros(2, 16)),
        lambda: layers.mhc_post(random(3, 2, H), random(2, 3, M, H), *mixes_for(2, 3)[1:]),
        lambda: layers.mhc_pre_apply_mix(random(2, M, H), torch.zeros(2, 2)),
        lambda: layers.mhc_pre_apply_mix(random(H), torch.zeros(4)),
    ],
)
def test_refusals(call: Callable[[], Any]) -> None:
    with pytest.raises(ArgumentError, match="expected"):
        call()


# ---- one gradient of a residual for several layers


def chain(residual: torch.Tensor, sub_layer: Any, apply: Any, behind: Any, extra: tuple[int, ...]) -> torch.Tensor:
    """A layer between pre_apply_mix and post; ``extra``: further users of the residual, before (0) and behind (1) the layer."""
    pre, post_mix, comb = mixes_for(2, 3)
    loss = torch.zeros(())
    if 0 in extra:
        loss = loss + residual.float().square().mean()
    x = sub_layer(apply(residual, pre))
    out = behind(x, residual, post_mix, comb)
    if 1 in extra:
        loss = loss + residual.float().sin().mean()
    return loss + (out.float() * random(*out.shape, dtype=torch.float32, seed=9)).sum()


@pytest.mark.parametrize("extra", [(), (0,), (1,), (0, 1)])
@pytest.mark.parametrize("is_leaf", [False, True])
@pytest.mark.parametrize("passes", [1, 2])
def test_gradients_of_a_residual(extra: tuple[int, ...], is_leaf: bool, passes: int) -> None:
    start = random(2, 3, M, H)
    ours, theirs = leaves(start, start.double())
    for _ in range(passes):
        residual, other = (ours, theirs) if is_leaf else (ours * 2, theirs * 2)
        chain(residual, lambda t: t * 2, layers.mhc_pre_apply_mix, layers.mhc_post, extra).backward()
        chain(other, lambda t: t * 2, plain_apply, plain_post, extra).backward()
    torch.testing.assert_close(ours.grad.double(), theirs.grad, rtol=3e-2, atol=0.1)


def test_the_gradient_of_a_layer_is_shared(kernels: dict[str, StandIn], monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[bool] = []

    def published(residual: torch.Tensor, edge: Any) -> Any:
        grad = gradient_sharing.published_grad(residual, edge)
        found.append(grad is not None)
        return grad

    monkeypatch.setattr(apply_mix, "published_grad", published)
    for extra in ((), (1,)):
        residual = random(2, 3, M, H).requires_grad_() * 2
        chain(residual, lambda t: t, layers.mhc_pre_apply_mix, layers.mhc_post, extra).backward()
    assert found == [True, False]  # autograd replaced the gradient by its sum with another


class Scaled(torch.autograd.Function):
    """A view whose gradient is not handed on as it is."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * 0.25


def test_what_lies_between_two_layers_is_not_skipped() -> None:
    def scaled(t: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = Scaled.apply(t)
        return result

    start = random(2, 3, M, H)
    ours, theirs = leaves(start, start.double())
    chain(ours, lambda t: t, lambda r, mix: layers.mhc_pre_apply_mix(scaled(r), mix), layers.mhc_post, ()).backward()
    chain(theirs, lambda t: t, lambda r, mix: plain_apply(scaled(r), mix), plain_post, ()).backward()
    torch.testing.assert_close(ours.grad.double(), theirs.grad, rtol=3e-2, atol=0.1)


def test_leaves_on_the_same_memory_have_gradients_of_their_own() -> None:
    first = random(2, 3, M, H).requires_grad_()
    second = first.detach().requires_grad_()
    pre, post_mix, comb = mixes_for(2, 3)
    layers.mhc_post(layers.mhc_pre_apply_mix(second, pre), first, post_mix, comb).float().sum().backward()
    wide = leaves(first.double(), second.double())
    plain_post(plain_apply(wide[1], pre), wide[0], post_mix, comb).sum().backward()
    close(first.grad, wide[0].grad)
    close(second.grad, wide[1].grad)


def test_a_gradient_of_an_earlier_pass_is_not_added_to() -> None:
    residual = random(2, 3, M, H).requires_grad_()
    pre, post_mix, comb = mixes_for(2, 3)
    layers.mhc_post(random(2, 3, H), residual, post_mix, comb).sum().backward()
    first, residual.grad = residual.grad.clone(), None
    layers.mhc_pre_apply_mix(residual, pre).sum().backward()
    close(residual.grad, pre.expand(2, 3, M, H))
    assert residual.untyped_storage().grad_from_mhc_post.view(first.shape).equal(first)
    gradient_sharing.withdraw_grad(residual)
    assert not hasattr(residual.untyped_storage(), "grad_from_mhc_post")


def test_residuals_on_one_storage() -> None:
    whole = random(2, 3, M, H)
    a, b = whole[0].detach().requires_grad_(), whole[1].detach().requires_grad_()
    pre, post_mix, comb = mixes_for(3)
    x = layers.mhc_pre_apply_mix(b, pre)
    layers.mhc_post(x, a, post_mix, comb).sum().backward()
    close(a.grad, comb.sum(-1, keepdim=True).expand(3, M, H))
    close(b.grad, pre * post_mix.sum(-2, keepdim=True).expand(3, M, H))

"""The mixes and the merged weight on a GPU: against the references, with gradients, and the refusals that the contract names."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gpu_checks import on_gpu_with, opcheck, same

from tkbuild import ops
from tkbuild.errors import ArgumentError, NoVariantError
from tkbuild.ops.modeling import mhc as layers
from tkbuild.reference import mhc as reference
from tkbuild.runtime.launcher import native

pytestmark = on_gpu_with("mhc.head_compute_mix", "mhc.pre_split_mixes", "mhc.fn_normw_merge")

F32 = torch.float32
COUNTS = [1, 31, 129, 1001, 8192]


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device="cuda")


def empty(*shape: int) -> torch.Tensor:
    return torch.full(shape, float("nan"), device="cuda")


def close(found: torch.Tensor | None, expected: torch.Tensor | None, rtol: float = 1e-5, atol: float = 2e-5) -> None:
    assert found is not None and expected is not None
    torch.testing.assert_close(found.double(), expected.double(), rtol=rtol, atol=atol)


@pytest.mark.parametrize("n", COUNTS)
def test_head(n: int) -> None:
    mix, scale, base, out = random(n, 4), random(1), random(4), empty(n, 4)
    assert ops.mhc.mhc_head_compute_mix_fwd(mix, scale, base, out, 1e-2) is None
    close(out, reference.head_compute_mix(mix, scale, base, mhc_pre_eps=1e-2), atol=1e-6)
    grad, mix_grad, count = random(n, 4), empty(n, 4), ops.get_num_sms()
    sums = empty(count, 1), empty(count, 4)
    ops.mhc.mhc_head_compute_mix_bwd(grad, mix, scale, base, mix_grad, *sums, count)
    scale_sums, base_sums, wanted = reference.head_compute_mix_bwd(grad, mix, scale, base, *sums)
    close(mix_grad, wanted)
    close(sums[0], scale_sums, rtol=1e-4, atol=1e-5)
    close(sums[1], base_sums, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("n", COUNTS)
@pytest.mark.parametrize("post_mult", [1.0, 2.0])
def test_split(n: int, post_mult: float) -> None:
    mixes, scale, base = random(n, 24), random(3), random(24)
    pre, post, comb = empty(n, 4), empty(n, 4, 1), empty(n, 4, 4)
    assert ops.mhc.mhc_pre_split_mixes_fwd(mixes, scale, base, pre, post, comb, post_mult, 1e-2) is None
    expected = reference.pre_split_mixes(mixes, scale, base, mhc_post_mult_value=post_mult, mhc_pre_eps=1e-2)
    for found, wanted in zip((pre, post, comb), expected, strict=True):
        close(found.view(n, -1), wanted, atol=1e-6)
    grads = [random(*t.shape) * 0.1 for t in (pre, post, comb)]
    outs = [empty(n, 24), empty(3), empty(24)]
    ops.mhc.mhc_pre_split_mixes_bwd(*grads, mixes, post, scale, base, *outs, post_mult)
    given = [*(g.view(n, -1) for g in grads), mixes, post.view(n, 4), scale, base]
    for found, wanted in zip(outs, reference.pre_split_mixes_bwd(*given, mhc_post_mult_value=post_mult), strict=True):
        close(found, wanted)
    again = [torch.empty_like(t) for t in outs]
    ops.mhc.mhc_pre_split_mixes_bwd(*grads, mixes, post, scale, base, *again, post_mult)
    assert all(same(a, b) for a, b in zip(outs, again, strict=True))


def test_one_sm_gives_the_gradients_too() -> None:
    scale, base = random(3), random(24)
    given = [
        random(3001, 4) * 0.1,
        random(3001, 4) * 0.1,
        random(3001, 16) * 0.1,
        random(3001, 24),
        torch.rand(3001, 4, device="cuda"),
        scale,
        base,
    ]
    outs = [empty(3001, 24), empty(3), empty(24)]
    try:
        ops.set_num_sms(1)
        ops.mhc.mhc_pre_split_mixes_bwd(*given, *outs, 2.0)
    finally:
        ops.set_num_sms(0)
    for found, wanted in zip(outs, reference.pre_split_mixes_bwd(*given, mhc_post_mult_value=2.0), strict=True):
        close(found, wanted)


@pytest.mark.parametrize(("rows", "columns"), [(24, 5120), (24, 28672), (1, 4), (25, 132), (24, 1000)])
def test_merge(rows: int, columns: int) -> None:
    fn, weight, out = random(rows, columns), random(columns), empty(rows, columns)
    assert ops.mhc.mhc_fn_normw_merge_fwd(fn, weight, out) is None
    assert same(out, fn * weight)
    grad, fn_grad, weight_grad = random(rows, columns), random(rows, columns), random(columns)
    wanted = reference.fn_normw_merge_bwd(fn, weight, grad, fn_grad.clone(), weight_grad.clone())
    alone = weight_grad.clone()
    ops.mhc.mhc_fn_normw_merge_bwd(fn, weight, grad, None, alone)
    ops.mhc.mhc_fn_normw_merge_bwd(fn, weight, grad, fn_grad, weight_grad)
    assert same(fn_grad, wanted[0])
    close(weight_grad, wanted[1])
    assert same(alone, weight_grad)


def head(mix: torch.Tensor, scale: torch.Tensor, base: torch.Tensor) -> torch.Tensor:
    return reference.head_compute_mix(mix.view(-1, 4), scale, base, mhc_pre_eps=1e-2).view(mix.shape)


@pytest.mark.parametrize("needed", range(1, 8))
def test_head_layer_against_autograd_of_the_reference(needed: int) -> None:
    given = [t.requires_grad_(bool(needed >> i & 1)) for i, t in enumerate((random(2, 501, 4), random(1), random(4)))]
    exact = [t.detach().double().requires_grad_(t.requires_grad) for t in given]
    y, z = layers.mhc_head_compute_mix(*given, 1e-2), head(*exact)
    grad = random(*y.shape)
    y.backward(grad)
    z.backward(grad.double())
    close(y.detach(), z.detach(), rtol=1e-4, atol=1e-5)
    for one, other in zip(given, exact, strict=True):
        if other.requires_grad:
            close(one.grad, other.grad, rtol=1e-4, atol=1e-4)
        else:
            assert one.grad is None


@pytest.mark.parametrize("needed", range(1, 8))
@pytest.mark.parametrize("used", [(0, 1, 2), (1,), (2,)])
def test_split_layer_against_autograd_of_the_reference(needed: int, used: tuple[int, ...]) -> None:
    given = [t.requires_grad_(bool(needed >> i & 1)) for i, t in enumerate((random(2, 501, 24), random(3), random(24)))]
    exact = [t.detach().double().requires_grad_(t.requires_grad) for t in given]
    found = layers.mhc_pre_split_mixes(*given, 4, 2.0, 1e-2)
    assert [tuple(t.shape) for t in found] == [(2, 501, 4, 1), (2, 501, 4, 1), (2, 501, 4, 4)]
    expected = reference.pre_split_mixes(exact[0].view(-1, 24), *exact[1:], mhc_post_mult_value=2.0, mhc_pre_eps=1e-2)
    grads = [random(*t.shape) for t in found]
    torch.autograd.backward([found[i] for i in used], [grads[i] for i in used])
    torch.autograd.backward([expected[i] for i in used], [grads[i].double().view(expected[i].shape) for i in used])
    for one, other in zip(given, exact, strict=True):
        if other.requires_grad:
            close(one.grad, other.grad, rtol=1e-4, atol=1e-3)
        else:
            assert one.grad is None


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's own modules, when they are first imported
def test_compiled_without_a_graph_break() -> None:
    def model(mixes: torch.Tensor, scale: torch.Tensor, base: torch.Tensor) -> torch.Tensor:
        pre, post, comb = layers.mhc_pre_split_mixes(mixes, scale, base, 4, 2.0, 1e-2)
        last = layers.mhc_head_compute_mix(pre.squeeze(-1), scale[:1].clone(), base[:4].clone(), 1e-2)
        return last.sum() + (post * comb).sum()

    def gradients(function: Any) -> list[torch.Tensor]:
        y = function(*given)
        return [y.detach(), *torch.autograd.grad(y, given)]

    given = [t.requires_grad_() for t in (random(2, 65, 24), random(3), random(24))]
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for found, expected in zip(gradients(compiled), gradients(model), strict=True):
        close(found, expected, rtol=1e-4, atol=1e-4)


def test_no_tokens_launch_nothing() -> None:
    scale, base, scales, bases = (
        random(1).requires_grad_(),
        random(4).requires_grad_(),
        random(3).requires_grad_(),
        random(24).requires_grad_(),
    )
    before = native().launch_count()
    layers.mhc_head_compute_mix(random(0, 4), scale, base, 1e-2).sum().backward()
    torch.cat([t.flatten() for t in layers.mhc_pre_split_mixes(random(2, 0, 24), scales, bases, 4, 2.0, 1e-2)]).sum().backward()
    sums = empty(3, 1), empty(3, 4)
    ops.mhc.mhc_head_compute_mix_bwd(random(0, 4), random(0, 4), random(1), random(4), empty(0, 4), *sums, 3)
    assert native().launch_count() == before
    for zeros in (scale.grad, base.grad, scales.grad, bases.grad, *sums):
        assert zeros is not None and not zeros.any()


@pytest.mark.parametrize(
    "call",
    [
        lambda o, m, q, s, b: o.mhc_head_compute_mix_fwd(q, s[:1], b[:4], q[:32].clone(), 0.0),
        lambda o, m, q, s, b: o.mhc_head_compute_mix_fwd(q, s, b[:4], q.clone(), 0.0),
        lambda o, m, q, s, b: o.mhc_head_compute_mix_fwd(m, s[:1], b[:4], q.clone(), 0.0),
        lambda o, m, q, s, b: o.mhc_head_compute_mix_fwd(q.double(), s[:1], b[:4], q.clone(), 0.0),
        lambda o, m, q, s, b: o.mhc_head_compute_mix_bwd(q, q, s[:1], b[:4], q.clone(), q[:8, :1], q[:8], 9),
        lambda o, m, q, s, b: o.mhc_head_compute_mix_bwd(q, q, s[:1], b[:4], q.clone(), q[:8, :1], q[:9], 8),
        lambda o, m, q, s, b: o.mhc_pre_split_mixes_fwd(q, s, b, q.clone(), q.clone(), m[:, :16].contiguous(), 1.0, 0.0),
        lambda o, m, q, s, b: o.mhc_pre_split_mixes_fwd(m, s[:2], b, q.clone(), q.clone(), m[:, :16].contiguous(), 1.0, 0.0),
        lambda o, m, q, s, b: o.mhc_pre_split_mixes_fwd(m, s, b, q.clone(), q.clone(), m[:, :16], 1.0, 0.0),
        lambda o, m, q, s, b: o.mhc_pre_split_mixes_fwd(m.cpu(), s, b, q.clone(), q.clone(), m[:, :16].contiguous(), 1.0, 0.0),
        lambda o, m, q, s, b: o.mhc_fn_normw_merge_fwd(m, b[:8], m.clone()),
        lambda o, m, q, s, b: o.mhc_fn_normw_merge_fwd(m[:, :6].contiguous(), b[:6], m[:, :6].contiguous()),
        lambda o, m, q, s, b: o.mhc_fn_normw_merge_bwd(m, b, m[:32], None, b.clone()),
        lambda o, m, q, s, b: layers.mhc_pre_split_mixes(m, s, b, 2, 1.0, 0.0),
        lambda o, m, q, s, b: layers.mhc_head_compute_mix(m, s[:1], b[:4], 0.0),
    ],
)
def test_refusals_launch_nothing(call: Any) -> None:
    tensors = random(64, 24), random(64, 4), random(3), random(24)
    before = native().launch_count()
    with pytest.raises((ArgumentError, NoVariantError)):
        call(ops.mhc, *tensors)
    assert native().launch_count() == before


def test_opcheck() -> None:
    mixes, quad, comb, scale, base, op = random(5, 24), random(5, 4), random(5, 16), random(3), random(24), torch.ops.tkbuild
    opcheck(op.mhc_head_compute_mix, (quad, scale[:1].clone(), base[:4].clone()), {"mhc_pre_eps": 1e-2})
    opcheck(op.mhc_head_compute_mix_bwd, (quad, quad.clone(), scale[:1].clone(), base[:4].clone(), random(3, 1), random(3, 4)))
    opcheck(op.mhc_pre_split_mixes, (mixes, scale, base), {"mhc_post_mult_value": 2.0, "mhc_pre_eps": 1e-2})
    opcheck(
        op.mhc_pre_split_mixes_bwd,
        (quad, quad.clone(), comb, mixes, quad.clone(), scale, base, random(6, 27)),
        {"num_partials": 6, "mhc_post_mult_value": 2.0},
    )
    fn, weight = random(24, 64), random(64)
    opcheck(op.mhc_fn_normw_merge, (fn, weight))
    opcheck(op.mhc_fn_normw_merge_bwd, (fn, weight, fn.clone(), fn.clone(), weight.clone()))
    opcheck(op.mhc_fn_normw_merge, (fn.requires_grad_(), weight.requires_grad_()))
    opcheck(op.mhc_head_compute_mix, tuple(t.clone().requires_grad_() for t in (quad, scale[:1], base[:4])), {"mhc_pre_eps": 1e-2})
    values = {"mhc_post_mult_value": 2.0, "mhc_pre_eps": 1e-2}
    opcheck(op.mhc_pre_split_mixes, tuple(t.clone().requires_grad_() for t in (mixes, scale, base)), values)

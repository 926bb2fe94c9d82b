"""The mixes before a layer on a GPU: kernels against the references, layer against autograd, layouts and refusals."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from gpu_checks import on_gpu_with, opcheck, same

from tkbuild import ops, reference
from tkbuild.errors import ArgumentError, NoVariantError
from tkbuild.ops.mhc.norm_fn import fn_partials
from tkbuild.ops.modeling.mhc import mhc_post, mhc_pre_norm_fn
from tkbuild.runtime.launcher import native

pytestmark = on_gpu_with("mhc.pre_norm_fn_mul", "mhc.pre_norm_fn_mul_bwd", "mhc.reduce_partials_and_rmsnorm")

BF16, F32 = torch.bfloat16, torch.float32
EPS = 1e-6
SHAPES = [
    (1, 256, 1, 1),
    (13, 5120, 1, 16),
    (64, 28672, 1, 16),
    (100, 7680, 1, 7),
    (33, 1024, 2, 3),
    (300, 3072, 3, 2),
    (2049, 10240, 1, 16),
    (4096, 7680, 1, 7),
    (9000, 1024, 1, 3),
]


def random(*shape: int, dtype: torch.dtype = F32) -> torch.Tensor:
    return torch.randn(shape, device="cuda").to(dtype)


def empty(*shape: int, dtype: torch.dtype = F32) -> torch.Tensor:
    return torch.full(shape, float("nan"), dtype=dtype, device="cuda")


def apart(rows: int, columns: int) -> torch.Tensor:
    """Rows of bfloat16 that lie apart."""
    return random(rows, columns + 64, dtype=BF16)[:, :columns]


def weights(columns: int) -> torch.Tensor:
    return random(24, columns) / columns**0.5


def products(x: torch.Tensor, fn: torch.Tensor, groups: int, splits: int) -> tuple[torch.Tensor, torch.Tensor]:
    outs = empty(splits, x.shape[0], groups, 24), empty(splits, x.shape[0], groups)
    ops.mhc.mhc_pre_norm_fn_mul_fwd(x, fn, *outs)
    return outs


@pytest.mark.parametrize(("n", "columns", "groups", "splits"), SHAPES)
def test_products_and_squares(n: int, columns: int, groups: int, splits: int) -> None:
    x, fn = apart(n, columns), weights(columns)
    got = products(x, fn, groups, splits)
    wanted = reference.mhc.pre_norm_fn_mul(x, fn, num_groups=groups, num_splits=splits)
    torch.testing.assert_close(got[0], wanted[0], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(got[1], wanted[1], atol=1e-3, rtol=1e-4)


def test_infinities_and_nan_concern_their_row_only() -> None:
    x, fn = apart(300, 1024), weights(1024)
    bad = x.clone()
    bad[3, 5], bad[77, 900] = float("nan"), float("inf")
    for got, wanted in zip(products(bad, fn, 1, 2), products(x, fn, 1, 2), strict=True):
        differs = (got != wanted).flatten(2).any(2).any(0)
        assert differs.nonzero().flatten().tolist() == [3, 77]


@pytest.mark.parametrize(("splits", "n", "groups"), [(1, 1, 1), (16, 4096, 1), (3, 33, 2)])
def test_normalisation(splits: int, n: int, groups: int) -> None:
    partials = random(splits, n, groups, 24), random(splits, n, groups).abs() + 1
    outs = empty(n, groups, 24), empty(n, groups), empty(n, 24)
    ops.mhc.mhc_reduce_partials_and_rmsnorm_fwd(*partials, *outs, 256, EPS, splits)
    wanted = reference.mhc.reduce_partials_and_rmsnorm(*partials, rms_group_size=256, rms_eps=EPS)
    assert same(outs[0], wanted[0])
    assert same(outs[1], wanted[1])
    torch.testing.assert_close(outs[2], wanted[2], atol=1e-4, rtol=1e-5)
    grads = empty(n, groups, 24), empty(n, groups)
    given = random(n, 24), *outs[:2]
    ops.mhc.mhc_reduce_partials_and_rmsnorm_bwd(*given, *grads, 256, EPS)
    wanted_grads = reference.mhc.reduce_partials_and_rmsnorm_bwd(*given, rms_group_size=256, rms_eps=EPS)
    for got, want in zip(grads, wanted_grads, strict=True):
        torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("n", "columns", "groups", "_splits"), SHAPES)
@pytest.mark.parametrize("accumulate", [True, False])
def test_gradients_of_the_products(n: int, columns: int, groups: int, _splits: int, accumulate: bool) -> None:
    x, fn = apart(n, columns), weights(columns)
    given = random(n, groups, 24), random(n, groups) / columns
    old = apart(n, columns)
    x_grad, fn_grad = old.clone(), empty(24, columns)
    ops.mhc.mhc_pre_norm_fn_mul_bwd(*given, x, fn, x_grad, fn_grad, accumulate)
    wanted = reference.mhc.pre_norm_fn_mul_bwd(*given, x, fn, old, fn, accumulate=int(accumulate))
    torch.testing.assert_close(x_grad, wanted[0], atol=1e-3, rtol=1.6e-2)
    torch.testing.assert_close(fn_grad, wanted[1], atol=2e-3, rtol=1e-4)
    only_x, only_fn = old.clone(), empty(24, columns)
    ops.mhc.mhc_pre_norm_fn_mul_bwd(*given, x, fn, only_x, None, accumulate)
    ops.mhc.mhc_pre_norm_fn_mul_bwd(*given, x, fn, None, only_fn)
    assert same(only_x, x_grad)
    assert same(only_fn, fn_grad)


def test_every_run_gives_the_same_bits() -> None:
    x, fn = random(3000, 5120, dtype=BF16), weights(5120)
    given = random(3000, 1, 24), random(3000, 1) / 5120

    def run() -> list[torch.Tensor]:
        x_grad, fn_grad = torch.zeros_like(x), empty(24, 5120)
        ops.mhc.mhc_pre_norm_fn_mul_bwd(*given, x, fn, x_grad, fn_grad)
        return [*products(x, fn, 1, 16), x_grad, fn_grad]

    wanted = run()
    try:
        for repeat in range(100):
            ops.set_pdl(repeat % 2 == 1)
            assert all(same(a, b) for a, b in zip(run(), wanted, strict=True))
    finally:
        ops.set_pdl(False)


def test_no_rows() -> None:
    x, fn, fn_grad = random(0, 512, dtype=BF16), weights(512), empty(24, 512)
    before = native().launch_count()
    partials = products(x, fn, 1, 2)
    outs = empty(0, 1, 24), empty(0, 1), empty(0, 24)
    ops.mhc.mhc_reduce_partials_and_rmsnorm_fwd(*partials, *outs, 512, EPS, 2)
    grads = empty(0, 1, 24), empty(0, 1)
    ops.mhc.mhc_reduce_partials_and_rmsnorm_bwd(outs[2], *outs[:2], *grads, 512, EPS)
    ops.mhc.mhc_pre_norm_fn_mul_bwd(*grads, x, fn, None, None)
    assert native().launch_count() == before
    ops.mhc.mhc_pre_norm_fn_mul_bwd(*grads, x, fn, torch.empty_like(x), fn_grad)
    assert same(fn_grad, torch.zeros_like(fn))
    assert mhc_pre_norm_fn(random(0, 3, 4, 64, dtype=BF16), weights(256), None, EPS).shape == (0, 3, 24)


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    """Sum of squared differences over the sum of squares: TF32 would cost about 1e-7."""
    a, b = a.double(), b.double()
    return float((a - b).square().sum() / (a.square() + b.square()).sum())


def composed(residual: torch.Tensor, fn: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
    """The layer from references, through which autograd can go; fn is not rounded."""
    x = residual.flatten(-2).double()
    rows = (fn if weight is None else fn * weight).double()
    return (x @ rows.T) * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS)


@pytest.mark.parametrize("lead", [(2, 6), (1, 48), (512,), (2, 2048)])
@pytest.mark.parametrize("columns", [64, 1280, 2560])
@pytest.mark.parametrize("with_weight", [False, True])
@pytest.mark.parametrize("fuse", [False, True])
def test_layer(lead: tuple[int, ...], columns: int, with_weight: bool, fuse: bool) -> None:
    residual, fn = random(*lead, 4, columns, dtype=BF16).requires_grad_(), weights(4 * columns).requires_grad_()
    weight = (random(4 * columns) * 0.1 + 1).requires_grad_() if with_weight else None
    given = [t for t in (residual, fn, weight) if t is not None]
    out = mhc_pre_norm_fn(residual, fn, weight, EPS, fuse_grad_acc=fuse)
    grad = random(*out.shape)
    wanted = composed(residual, fn, weight)
    torch.testing.assert_close(out.double(), wanted, atol=1e-4, rtol=1e-4)
    expected = torch.autograd.grad(wanted, given, grad.double())
    got = torch.autograd.grad(out, given, grad)
    torch.testing.assert_close(got[0], expected[0], atol=1e-3, rtol=1.6e-2)
    for ours, theirs in zip(got[1:], expected[1:], strict=True):
        assert relative(ours, theirs) < 1e-9


@pytest.mark.parametrize("needs", [(True, False, False), (False, True, False), (False, False, True), (True, False, True)])
def test_any_subset_of_gradients(needs: tuple[bool, ...]) -> None:
    tensors = [random(33, 4, 128, dtype=BF16), weights(512), random(512)]
    whole = [t.clone().requires_grad_() for t in tensors]
    part = [t.clone().requires_grad_(need) for t, need in zip(tensors, needs, strict=True)]
    for given in (whole, part):
        mhc_pre_norm_fn(*given, EPS).sum().backward()
    for ours, all_of_them, need in zip(part, whole, needs, strict=True):
        assert (ours.grad is not None) == need
        assert ours.grad is None or same(ours.grad, all_of_them.grad)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients(mode: Callable[[], Any]) -> None:
    residual, fn = random(33, 4, 128, dtype=BF16), weights(512).requires_grad_()
    wanted = mhc_pre_norm_fn(residual, fn, None, EPS)
    with mode():
        got = mhc_pre_norm_fn(residual, fn, None, EPS)
    assert not got.requires_grad
    assert same(got, wanted.detach())


def test_gradient_is_added_to_that_of_post() -> None:
    residual, fn = random(64, 4, 256, dtype=BF16), weights(1024)
    x, post, comb = random(64, 256, dtype=BF16), random(64, 4, 1), random(64, 4, 4)
    grads = []
    for fuse in (True, False):
        streams, rows = residual.clone().requires_grad_(), fn.clone().requires_grad_()
        shared = streams * 1
        mixes = mhc_pre_norm_fn(shared, rows, None, EPS, fuse_grad_acc=fuse)
        out = mhc_post(x, shared, post * mixes[..., :4, None], comb)
        out.float().square().sum().backward()
        assert not hasattr(shared.untyped_storage(), "grad_from_mhc_post") or not fuse
        grads.append((streams.grad, rows.grad))
    assert relative(grads[0][0], grads[1][0]) < 1e-4
    assert same(grads[0][1], grads[1][1])


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's own modules, while it traces
def test_layer_under_compile() -> None:
    residual, fn, weight = random(2, 40, 4, 128, dtype=BF16), weights(512), random(512)
    compiled = torch.compile(lambda *tensors: mhc_pre_norm_fn(*tensors, EPS), backend="aot_eager", fullgraph=True)
    results = []
    for function in (compiled, lambda *tensors: mhc_pre_norm_fn(*tensors, EPS)):
        given = [t.clone().requires_grad_() for t in (residual, fn, weight)]
        out = function(*given)
        out.square().sum().backward()
        results.append([out, *(t.grad for t in given)])
    assert all(same(a, b) for a, b in zip(*results, strict=True))


def test_second_derivatives_are_refused() -> None:
    residual, fn = random(5, 4, 64, dtype=BF16), weights(256).requires_grad_()
    (grad,) = torch.autograd.grad(mhc_pre_norm_fn(residual, fn, None, EPS).square().sum(), fn, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


@pytest.mark.parametrize(
    "call",
    [
        lambda: products(random(5, 320, dtype=BF16), weights(320), 1, 1),
        lambda: products(random(5, 256, dtype=BF16), weights(512), 1, 1),
        lambda: products(random(5, 260, dtype=BF16)[:, :256], weights(256), 1, 1),
        lambda: products(random(5, 257, dtype=BF16)[:, 1:], weights(256), 1, 1),
        lambda: products(random(5, 256), weights(256), 1, 1),
        lambda: products(random(5, 256, dtype=BF16), weights(256), 1, 256),
        lambda: products(random(5, 256, dtype=BF16).cpu(), weights(256), 1, 1),
        lambda: ops.mhc.mhc_reduce_partials_and_rmsnorm_fwd(
            random(2, 5, 1, 24), random(2, 5, 1), random(5, 1, 24), random(5, 1), random(5, 24), 256, EPS, 3
        ),
        lambda: mhc_pre_norm_fn(random(5, 4, 72, dtype=BF16), weights(288), None, EPS),
        lambda: mhc_pre_norm_fn(random(256, dtype=BF16), weights(256), None, EPS),
        lambda: mhc_pre_norm_fn(random(5, 4, 64, dtype=BF16), random(256), None, EPS),
        lambda: mhc_pre_norm_fn(random(5, 4, 64, dtype=BF16), random(23, 256), None, EPS),
        lambda: mhc_pre_norm_fn(random(5, 4, 64, dtype=BF16), weights(256), None, EPS, n_splits=0),
    ],
)
def test_refusals_launch_nothing(call: Callable[[], Any]) -> None:
    before = native().launch_count()
    with pytest.raises((ArgumentError, NoVariantError)):
        call()
    assert native().launch_count() == before


def test_torch_ops() -> None:
    x, fn = random(5, 256, dtype=BF16), weights(256)
    opcheck(torch.ops.tkbuild.mhc_pre_norm_fn_mul, (x, fn), {"num_groups": 1, "num_splits": 2})
    partials = random(2, 5, 1, 24), random(2, 5, 1).abs()
    group = {"rms_group_size": 256, "rms_eps": EPS}
    opcheck(torch.ops.tkbuild.mhc_reduce_partials_and_rmsnorm, partials, group)
    grads = random(5, 24), random(5, 1, 24), random(5, 1).abs()
    opcheck(torch.ops.tkbuild.mhc_reduce_partials_and_rmsnorm_bwd, grads, group)
    given = random(5, 1, 24), random(5, 1), x, fn, torch.zeros_like(x), empty(24, 256).zero_(), fn_partials(x, fn, True).zero_()
    opcheck(torch.ops.tkbuild.mhc_pre_norm_fn_mul_bwd, given, {"num_partials": given[-1].shape[0], "accumulate": 0})

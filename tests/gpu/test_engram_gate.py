"""The gate on a GPU: the public functions of both releases and the layer, against the references and their autograd."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gpu_checks import on_gpu_with, opcheck, same, same_with_programmatic_launches

from tkbuild import ops, reference
from tkbuild.errors import ArgumentError, NoVariantError
from tkbuild.ops import v1
from tkbuild.runtime.launcher import native

pytestmark = on_gpu_with("engram.gate_fwd", "engram.gate_bwd")

BF16, F64 = torch.bfloat16, torch.float64
EPS, CLAMP = 1e-20, 1e-6
WIDTHS = [512, 1280, 2048, 2560, 4096, 7168, 7680, 8192]
FORWARD_DIFFERENCE, GRAD_DIFFERENCE = 2e-10, 1e-8
#: What one of 20000 elements of bfloat16 adds to a difference when it is rounded the other way.
ROUNDING_DIFFERENCE = 5e-10


def random(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.randn(shape, device="cuda").to(dtype)


def inputs(tokens: int, width: int, streams: int = 4) -> tuple[torch.Tensor, ...]:
    """hidden_states, kv and the fused weight."""
    return random(tokens, streams, width), random(tokens, streams + 1, width), random(streams, width, dtype=torch.float32)


def difference(a: torch.Tensor, b: torch.Tensor) -> float:
    a, b = a.double(), b.double()
    return float((a - b).square().sum() / (a.square() + b.square()).sum().clamp_min(1e-300))


def close(a: torch.Tensor, b: torch.Tensor, limit: float) -> bool:
    """Whether the difference is below ``limit``, but for a few elements that have been rounded the other way."""
    return a.dtype == b.dtype and difference(a, b) < limit + ROUNDING_DIFFERENCE + 1e-4 / a.numel()


def forward_reference(x: torch.Tensor, kv: torch.Tensor, weight: torch.Tensor, mask: Any = None, clamp: float = CLAMP) -> Any:
    """dot, gate, rstd_x, rstd_k and the output in float64."""
    x, kv, weight = x.to(F64), kv.to(F64), weight.to(F64)
    statistics = torch.zeros(4, *x.shape[:2], dtype=F64, device="cuda")
    return reference.engram.gate_fwd(x, kv[:, :-1], kv[:, -1], weight, mask, *statistics, eps=EPS, clamp_value=clamp)


@pytest.mark.parametrize("width", [512, 2560, 4096, 7168])
@pytest.mark.parametrize("tokens", [67, 4001])
def test_gates_are_those_of_their_own_dots(tokens: int, width: int) -> None:
    """``verify`` cannot be as strict: the sign of a dot near 0 depends on the order of its sum."""
    _, dot, gate, rstd_x, rstd_k = ops.engram.engram_gate_fwd(*inputs(tokens, width), EPS, CLAMP)
    distance = dot.double() * rstd_x.double() * rstd_k.double() / width**0.5
    wanted = torch.sigmoid(torch.copysign(distance.abs().clamp_min(CLAMP).sqrt(), distance))
    torch.testing.assert_close(gate.double(), wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("tokens", [1, 67, 4001])
def test_forward(tokens: int, width: int) -> None:
    x, kv, weight = inputs(tokens, width)
    out, *saved = ops.engram.engram_gate_fwd(x, kv, weight, EPS, CLAMP)
    *wanted, wanted_out = forward_reference(x, kv, weight)
    assert close(out, wanted_out.bfloat16(), FORWARD_DIFFERENCE)
    for ours, theirs in zip(saved, wanted, strict=True):
        assert difference(ours, theirs) < FORWARD_DIFFERENCE
    plain, *nothing = ops.engram.engram_gate_fwd(x, kv, weight, EPS, CLAMP, save_for_backward=False)
    assert nothing == [None] * 4
    assert same(plain, out)
    place = x.clone()
    assert ops.engram.engram_gate_fwd(place, kv, weight, EPS, CLAMP, save_for_backward=False, inplace=True)[0] is place
    assert same(place, out)


@pytest.mark.parametrize("width", [512, 2560, 7168])
@pytest.mark.parametrize("inplace", [False, True])
def test_image_tokens_keep_their_bits(width: int, inplace: bool) -> None:
    x, kv, weight = inputs(1001, width)
    mask = torch.rand(1001, device="cuda") < 0.3
    kv[mask] = float("nan")
    old = x.clone()
    out = ops.engram.engram_gate_fwd(x, kv, weight, EPS, CLAMP, False, image_token_mask=mask, inplace=inplace)[0]
    plain = ops.engram.engram_gate_fwd(old, kv, weight, EPS, CLAMP, False)[0]
    assert same(out[mask], old[mask])
    assert same(out[~mask], plain[~mask])


@pytest.mark.parametrize("streams", [1, 3, 5])
def test_other_numbers_of_streams(streams: int) -> None:
    x, kv, weight = inputs(77, 1280, streams)
    out = ops.engram.engram_gate_fwd(x, kv, weight, EPS, CLAMP)[0]
    assert close(out, forward_reference(x, kv, weight)[4].bfloat16(), FORWARD_DIFFERENCE)


def backward_reference(given: tuple[torch.Tensor, ...], saved: list[torch.Tensor], mask: Any, count: int) -> Any:
    """Gradients of x and kv and ``count`` partial sums of the weight's, in float64. ``given``: the gradient, x, kv and the weight.

    From the same statistics: close to d = 0 their last bits decide over the gradient, whose slope has no bound there.
    """
    grad_out, x, kv, weight = (t.to(F64) for t in given)
    grad_x, grad_k, grad_v, partial = reference.engram.gate_bwd(
        grad_out, x, kv[:, :-1], kv[:, -1], weight, *saved, mask, clamp_value=CLAMP, num_partials=count
    )
    return grad_x, torch.cat((grad_k, grad_v[:, None]), dim=1), partial


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("tokens", [1, 67, 2001])
@pytest.mark.parametrize("masked", [False, True])
def test_backward(tokens: int, width: int, masked: bool) -> None:
    (x, kv, weight), grad_out = inputs(tokens, width), random(tokens, 4, width)
    mask = torch.arange(tokens, device="cuda") % 3 == 1 if masked else None
    _, *saved = ops.engram.engram_gate_fwd(x, kv, weight, EPS, CLAMP, image_token_mask=mask)
    if mask is not None:
        for statistic in saved:
            statistic[mask] = float("nan")
    grad_x, grad_kv, partial = ops.engram.engram_gate_bwd(grad_out, x, kv, weight, *saved, CLAMP, mask)
    wanted_x, wanted_kv, wanted_partial = backward_reference((grad_out, x, kv, weight), saved, mask, len(partial))
    assert close(grad_x, wanted_x.bfloat16(), GRAD_DIFFERENCE)
    assert close(grad_kv, wanted_kv.bfloat16(), GRAD_DIFFERENCE)
    assert difference(partial, wanted_partial) < GRAD_DIFFERENCE
    again = ops.engram.engram_gate_bwd(grad_out, x, kv, weight, *saved, CLAMP, mask)
    assert all(same(a, b) for a, b in zip(again, (grad_x, grad_kv, partial), strict=True))


@pytest.mark.parametrize("width", [512, 2560, 7168])
def test_a_clamped_gate_has_no_gradient(width: int) -> None:
    (x, kv, weight), grad_out = inputs(67, width), random(67, 4, width)
    _, *saved = ops.engram.engram_gate_fwd(x, kv, weight, EPS, 1e6)
    grad_x, grad_kv, partial = ops.engram.engram_gate_bwd(grad_out, x, kv, weight, *saved, 1e6)
    assert same(grad_x, grad_out)
    assert not grad_kv[:, :4].any()
    assert not partial.any()


def test_the_number_of_sms_changes_the_order_of_one_sum_only() -> None:
    (x, kv, weight), grad_out = inputs(301, 7168), random(301, 4, 7168)

    def both() -> list[torch.Tensor]:
        out, *saved = ops.engram.engram_gate_fwd(x, kv, weight, EPS, CLAMP)
        return [out, *saved, *ops.engram.engram_gate_bwd(grad_out, x, kv, weight, *saved, CLAMP)]

    *wanted, partial = both()
    try:
        ops.set_num_sms(1)
        *got, small = both()
    finally:
        ops.set_num_sms(0)
    assert all(same(a, b) for a, b in zip(got, wanted, strict=True))
    assert len(small) == 1
    assert difference(small.sum(0), partial.sum(0)) < GRAD_DIFFERENCE


def test_release_1_0_takes_keys_and_values_apart() -> None:
    (x, kv, weight), grad_out = inputs(301, 2560), random(301, 4, 2560)
    k, v = random(301, 4, 2624)[..., :2560], random(301, 2576)[:, :2560]
    k.copy_(kv[:, :4])
    v.copy_(kv[:, 4])
    ours, theirs = (v1.engram.engram_gate_fwd(x, k, v, weight, EPS, CLAMP), ops.engram.engram_gate_fwd(x, kv, weight, EPS, CLAMP))
    assert all(same(a, b) for a, b in zip(ours, theirs, strict=True))
    grads = v1.engram.engram_gate_bwd(grad_out, x, k, v, weight, *ours[1:], CLAMP)
    grad_x, grad_kv, partial = ops.engram.engram_gate_bwd(grad_out, x, kv, weight, *ours[1:], CLAMP)
    assert all(same(a, b) for a, b in zip(grads, (grad_x, grad_kv[:, :4], grad_kv[:, 4], partial), strict=True))


def test_programmatic_launch_gives_the_same_results() -> None:
    (x, kv, weight), grad_out = inputs(2048, 4096), random(2048, 4, 4096)

    def chain() -> list[torch.Tensor]:
        out, *saved = ops.engram.engram_gate_fwd(x, kv, weight, EPS, CLAMP)
        return [out, *ops.engram.engram_gate_bwd(grad_out, x, kv, weight, *saved, CLAMP)]

    assert same_with_programmatic_launches(chain)


# ---- the layer


def layer_inputs(rows: tuple[int, ...], width: int) -> list[torch.Tensor]:
    """hidden_states, kv and the two weights, with gradients."""
    shapes = (*rows, 4, width), (*rows, 5 * width), (4, width), (4, width)
    return [random(*shape).requires_grad_() for shape in shapes]


def layer_reference(given: list[torch.Tensor], grad_out: torch.Tensor, mask: Any = None) -> tuple[torch.Tensor, ...]:
    """Gradients of the layer's inputs, by autograd of the reference in float64."""
    x, kv, hidden, embed = (t.detach().to(F64).requires_grad_() for t in given)
    rows, width = x.reshape(-1, *x.shape[-2:]), x.shape[-1]
    out = forward_reference(rows, kv.reshape(-1, 5, width), hidden * embed, mask)[4]
    return torch.autograd.grad(out.view(x.shape), (x, kv, hidden, embed), grad_out.to(F64))


@pytest.mark.parametrize("wanted", range(1, 16))
def test_any_subset_of_inputs_may_need_a_gradient(wanted: int) -> None:
    given = layer_inputs((2, 33), 2560)
    for index, tensor in enumerate(given):
        tensor.requires_grad_(bool(wanted >> index & 1))
    mask = torch.rand(2, 33, device="cuda") < 0.3
    out = ops.modeling.engram.engram_gate(*given, CLAMP, EPS, mask)
    grad_out = random(*out.shape)
    out.backward(grad_out)
    for tensor, grad in zip(given, layer_reference(given, grad_out, mask.flatten()), strict=True):
        assert (tensor.grad is not None) == tensor.requires_grad
        if tensor.grad is not None:
            assert difference(tensor.grad, grad.bfloat16()) < 1e-4  # a d close to 0 has a slope that its last bits decide


def test_main_grad_takes_the_gradient() -> None:
    given = layer_inputs((301,), 7168)
    twin = [t.detach().clone().requires_grad_() for t in given]
    given[2].main_grad = torch.ones(4, 7168, device="cuda")
    for inputs_ in (given, twin):
        for _ in range(2):
            ops.modeling.engram.engram_gate(*inputs_, CLAMP, EPS).sum().backward()
    assert given[2].grad is None
    assert difference(given[2].main_grad - 1, twin[2].grad) < 1e-4
    assert same(given[3].grad, twin[3].grad)


def test_one_tensor_as_both_weights() -> None:
    given = layer_inputs((65,), 512)
    weight, twin = given[2], given[2].detach().clone().requires_grad_()
    weight.main_grad = torch.zeros(4, 512, device="cuda")
    for tensor in (weight, twin):
        ops.modeling.engram.engram_gate(*given[:2], tensor, tensor, CLAMP, EPS).sum().backward()
    assert weight.grad is None
    assert difference(weight.main_grad, twin.grad) < 1e-4


def test_the_layer_of_release_1_0() -> None:
    given = layer_inputs((7, 9), 1280)
    apart = [t.detach().clone() for t in (given[0], *given[1].detach().view(7, 9, 5, 1280).split((4, 1), dim=2), *given[2:])]
    apart[2] = apart[2][..., 0, :]
    for tensor in apart:
        tensor.requires_grad_()
    ops.modeling.engram.engram_gate(*given, CLAMP, EPS).sum().backward()
    v1.modeling.engram.engram_gate(*apart, CLAMP, EPS).sum().backward()
    x, k, v, hidden, embed = (t.grad for t in apart)
    joined = torch.cat((k, v[..., None, :]), dim=-2).flatten(-2)
    assert all(same(a, t.grad) for a, t in zip((x, joined, hidden, embed), given, strict=True))


def test_inputs_of_any_layout() -> None:
    plain = layer_inputs((2, 33), 2560)
    x, kv, hidden, embed = (t.detach() for t in plain)
    wide, later = kv.new_zeros(2, 33, 5 * 2560, 2), kv.new_zeros(2, 33, 5 * 2560 + 8)
    wide[..., 0], later[..., 4:-4] = kv, kv
    wanted = ops.modeling.engram.engram_gate(*plain, CLAMP, EPS)
    wanted.sum().backward()
    for keys in (wide[..., 0], later[..., 4:-4]):
        given = [t.requires_grad_() for t in (x.mT.contiguous().mT, keys.detach(), hidden.T.contiguous().T, embed.T.contiguous().T)]
        out = ops.modeling.engram.engram_gate(*given, CLAMP, EPS)
        assert same(out, wanted)
        out.sum().backward()
        assert all(same(a.grad, b.grad) for a, b in zip(given, plain, strict=True))


def test_without_gradients() -> None:
    given = layer_inputs((33,), 2048)
    wanted = ops.modeling.engram.engram_gate(*given, CLAMP, EPS)
    with torch.no_grad():
        plain = ops.modeling.engram.engram_gate(*given, CLAMP, EPS)
    with torch.inference_mode():
        inferred = ops.modeling.engram.engram_gate(*given, CLAMP, EPS)
        assert same(inferred, wanted)
    assert not plain.requires_grad
    assert same(plain, wanted)


def test_double_backward_is_refused() -> None:
    given = layer_inputs((5,), 512)
    loss = ops.modeling.engram.engram_gate(*given, CLAMP, EPS).float().square().sum()
    (grad,) = torch.autograd.grad(loss, given[0], create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's own modules, while it traces
@pytest.mark.parametrize("fused", [False, True])
def test_the_layer_compiles_into_one_graph(fused: bool) -> None:
    given = layer_inputs((65,), 2560)
    twin = [t.detach().clone().requires_grad_() for t in given]
    if fused:
        given[2].main_grad, twin[2].main_grad = (torch.zeros(4, 2560, device="cuda") for _ in range(2))
    compiled = torch.compile(lambda *t: ops.modeling.engram.engram_gate(*t, CLAMP, EPS), backend="aot_eager", fullgraph=True)
    compiled(*given).sum().backward()
    ops.modeling.engram.engram_gate(*twin, CLAMP, EPS).sum().backward()
    for ours, theirs in zip(given, twin, strict=True):
        assert (ours.grad is None) == (theirs.grad is None)
        assert ours.grad is None or same(ours.grad, theirs.grad)
    assert not fused or same(given[2].main_grad, twin[2].main_grad)


# ---- edges


def test_no_tokens() -> None:
    x, kv, weight = inputs(0, 2048)
    before = native().launch_count()
    out, *saved = ops.engram.engram_gate_fwd(x, kv, weight, EPS, CLAMP)
    assert out.shape == (0, 4, 2048)
    grad_x, grad_kv, partial = ops.engram.engram_gate_bwd(x, x, kv, weight, *saved, CLAMP)
    assert (grad_x.shape, grad_kv.shape, partial.shape) == (x.shape, kv.shape, (0, 4, 2048))
    assert native().launch_count() == before
    given = layer_inputs((0,), 2048)
    ops.modeling.engram.engram_gate(*given, CLAMP, EPS).sum().backward()
    assert all(not t.grad.any() for t in given)


@pytest.mark.parametrize(
    "call",
    [
        lambda e, x, kv, w: e.engram_gate_fwd(x, kv[:, :4], w, EPS, CLAMP),
        lambda e, x, kv, w: e.engram_gate_fwd(x, kv[:5], w, EPS, CLAMP),
        lambda e, x, kv, w: e.engram_gate_fwd(x[0], kv, w, EPS, CLAMP),
        lambda e, x, kv, w: e.engram_gate_fwd(x, kv, w.bfloat16(), EPS, CLAMP),
        lambda e, x, kv, w: e.engram_gate_fwd(x.float(), kv, w, EPS, CLAMP),
        lambda e, x, kv, w: e.engram_gate_fwd(x, kv, w[:3], EPS, CLAMP),
        lambda e, x, kv, w: e.engram_gate_fwd(x, kv, w, EPS, CLAMP, inplace=True),
        lambda e, x, kv, w: e.engram_gate_fwd(x, kv, w, EPS, CLAMP, image_token_mask=torch.zeros(7, device="cuda")),
        lambda e, x, kv, w: e.engram_gate_fwd(x[..., :508], kv[..., :508], w[:, :508], EPS, CLAMP),
        lambda e, x, kv, w: e.engram_gate_fwd(x.cpu(), kv.cpu(), w.cpu(), EPS, CLAMP),
        lambda e, x, kv, w: e.engram_gate_fwd(*inputs(3, 8200), EPS, CLAMP),
        lambda e, x, kv, w: e.engram_gate_bwd(x, x, kv[:, :4], w, *statistics(7, 4), CLAMP),
        lambda e, x, kv, w: e.engram_gate_bwd(x[:, :3], x[:, :3], kv[:, :4], w[:3], *statistics(7, 3), CLAMP),
        lambda e, x, kv, w: e.engram_gate_bwd(x, x, kv, w, *statistics(6, 4), CLAMP),
    ],
)
def test_refusals_launch_nothing(call: Any) -> None:
    given = inputs(7, 512)
    before = native().launch_count()
    with pytest.raises((ArgumentError, NoVariantError)):
        call(ops.engram, *given)
    assert native().launch_count() == before


def statistics(tokens: int, streams: int) -> list[torch.Tensor]:
    return [random(tokens, streams, dtype=torch.float32) for _ in range(4)]


def test_opcheck() -> None:
    (x, kv, weight), saved = inputs(5, 512), statistics(5, 4)
    k, v = kv[:, :4], kv[:, 4]
    mask = torch.zeros(5, dtype=torch.bool, device="cuda")
    opcheck(torch.ops.tkbuild.engram_gate_fwd, (x, k, v, weight, mask, *saved), {"eps": EPS, "clamp_value": CLAMP})
    opcheck(
        torch.ops.tkbuild.engram_gate_bwd, (x.clone(), x, k, v, weight, *saved, None), {"clamp_value": CLAMP, "num_partials": 3}
    )

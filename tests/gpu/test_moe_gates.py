"""The gates of experts on a GPU, through the public functions, against their references."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gpu_checks import opcheck

from tkbuild import ops
from tkbuild.errors import ArgumentError, NoVariantError
from tkbuild.ops import v1
from tkbuild.reference import moe as reference
from tkbuild.runtime.launcher import native

pytestmark = pytest.mark.gpu

SCORINGS = ("sigmoid", "sqrtsoftplus", "softmax")
FORWARD = ("mask", "bias", "image_bias", "image_token_mask", "fix_routing_mask", "to_physical_map", "logical_count")
TOP2 = ("mask", "fix_routing_mask", "to_physical_map", "logical_count", "unmapped_topk_idx")
Tensors = dict[str, torch.Tensor]


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device="cuda")


def integers(low: int, high: int, *shape: int) -> torch.Tensor:
    return torch.randint(low, high, shape, device="cuda")


def flags(tokens: int) -> torch.Tensor:
    return torch.rand(tokens, device="cuda") < 0.5


def clones(tensors: Tensors) -> Tensors:
    return {name: tensor.clone() for name, tensor in tensors.items()}


def forward_tensors(tokens: int, experts: int, k: int, shared: int) -> Tensors:
    return {
        "mask": flags(tokens) | flags(tokens),
        "bias": random(experts),
        "image_bias": random(experts),
        "image_token_mask": flags(tokens),
        "fix_routing_mask": flags(tokens),
        "to_physical_map": integers(0, 1000, experts + shared, 5).int(),
        "logical_count": integers(-1, 9, experts + shared).int(),
        "unmapped_topk_idx": integers(-2, experts + 2, tokens, k + 3)[:, :k],
        "force_random": flags(tokens) & flags(tokens),
        "scores": torch.ones(tokens, experts, device="cuda"),
    }


def wanted_forward(logits: torch.Tensor, k: int, shared: int, scale: float, rank: int, given: Tensors) -> tuple[torch.Tensor, ...]:
    names = (*FORWARD, "force_random", "unmapped_topk_idx", "scores")
    tensors = [given.get(name) for name in names]
    return reference.moe_topk_gate_forward(
        logits, *tensors, num_topk=k, num_shared=shared, routed_scaling_factor=scale, ep_rank=rank
    )


def assert_close(got: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-8, equal_nan=True)


def plain(logits: torch.Tensor, k: int, **given: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return ops.moe.moe_topk_gate_forward(logits, k, False, 0, 2.5, 0, **given)


@pytest.mark.parametrize(("experts", "k"), [(4, 4), (72, 6), (128, 6), (256, 8), (384, 8), (512, 9), (1024, 30)])
@pytest.mark.parametrize("shared", [0, 1, 2])
def test_forward_with_everything(experts: int, k: int, shared: int) -> None:
    logits, given = random(301, experts), forward_tensors(301, experts, k, shared)
    before = clones(given)
    idx, weights = ops.moe.moe_topk_gate_forward(logits, k, shared > 0, shared, 1.5, 3, **given)
    picks, scores, wanted_idx, wanted_weights = wanted_forward(logits, k, shared, 1.5, 3, before)
    assert torch.equal(idx, wanted_idx)
    assert torch.equal(given["unmapped_topk_idx"], picks)
    assert_close(weights, wanted_weights)
    assert_close(given["scores"], scores)
    unchanged = given.keys() - {"unmapped_topk_idx", "scores"}
    assert all(torch.equal(given[name], before[name]) for name in unchanged)


@pytest.mark.parametrize("absent", [*FORWARD, "force_random", "unmapped_topk_idx", "scores"])
def test_forward_without_one_tensor(absent: str) -> None:
    logits, given = random(67, 72), forward_tensors(67, 72, 6, 1)
    del given[absent]
    for one, other in (
        ("image_bias", "image_token_mask"),
        ("to_physical_map", "logical_count"),
        ("unmapped_topk_idx", "fix_routing_mask"),
    ):
        if absent in (one, other):
            given = {name: tensor for name, tensor in given.items() if name not in (one, other)}
    before = clones(given)
    idx, weights = ops.moe.moe_topk_gate(logits, 6, True, 1, 1.5, 3, **given)
    *_, wanted_idx, wanted_weights = wanted_forward(logits, 6, 1, 1.5, 3, before)
    assert torch.equal(idx, wanted_idx)
    assert_close(weights, wanted_weights)


@pytest.mark.parametrize("tokens", [1, 2, 31, 257])
def test_forward_of_slices(tokens: int) -> None:
    wide = random(tokens, 512)
    for logits in (wide[:, 256:], wide[:, 4:76], wide[tokens // 2 :, :72]):
        idx, weights = plain(logits, 6)
        assert torch.equal(idx, plain(logits.contiguous(), 6)[0])
        assert_close(weights, wanted_forward(logits, 6, 0, 2.5, 0, {})[1])


def test_forward_of_any_logits() -> None:
    nan, inf = float("nan"), float("inf")
    logits = random(7, 72)
    logits[0], logits[1, 3], logits[2], logits[3], logits[5] = nan, nan, inf, -inf, 1.0
    logits[4, ::2], logits[4, 1::4] = nan, -inf
    idx, weights = plain(logits, 8)
    wanted_idx, wanted_weights = wanted_forward(logits, 8, 0, 2.5, 0, {})
    assert torch.equal(idx, wanted_idx)
    assert_close(weights, wanted_weights)
    assert all(len(set(row)) == 8 for row in idx.tolist())
    assert ((idx >= 0) & (idx < 72)).all()


def test_forward_into_given_buffers() -> None:
    logits = random(9, 72)
    out = (torch.full((9, 7), -7, device="cuda"), torch.full((9, 7), -7.0, device="cuda"))
    idx, weights = ops.moe.moe_topk_gate_forward(logits, 6, True, 1, 2.5, 0, out=out)
    assert (idx.data_ptr(), weights.data_ptr()) == (out[0].data_ptr(), out[1].data_ptr())
    assert torch.equal(idx[:, :6], plain(logits, 6)[0])
    assert idx[:, 6].tolist() == [72] * 9
    assert weights[:, 6].tolist() == [1.0] * 9


def test_random_routing_is_reproducible_and_depends_on_the_rank() -> None:
    logits, force_random = random(500, 256), torch.ones(500, dtype=torch.bool, device="cuda")
    calls = [ops.moe.moe_topk_gate_forward(logits, 8, False, 0, 2.5, rank, force_random=force_random) for rank in (1, 1, 2)]
    assert torch.equal(calls[0][0], calls[1][0])
    assert torch.equal(calls[0][1], calls[1][1])
    assert not torch.equal(calls[0][0], calls[2][0])
    assert all(len(set(row)) == 8 for row in calls[0][0].tolist())


@pytest.mark.parametrize("scoring", SCORINGS)
@pytest.mark.parametrize(
    ("experts", "groups", "kept", "k"),
    [(72, 0, 0, 6), (256, 8, 8, 8), (256, 8, 4, 8), (144, 12, 5, 6), (144, 16, 2, 6), (1024, 32, 16, 32), (384, 12, 11, 8)],
)
def test_top2_sum_gate(scoring: str, experts: int, groups: int, kept: int, k: int) -> None:
    logits, bias = random(301, experts), random(experts)
    ranks = {"ep_rank": 1, "num_ep_ranks": 4, "tp_rank": 1, "num_tp_ranks": 2}
    idx, weights = v1.moe.top2_sum_gate(logits, bias, k, kept, groups, False, 0, 1.5, *ranks.values(), scoring)
    wanted_idx, wanted_weights = reference.top2_sum_gate(
        logits,
        bias,
        num_topk=k,
        num_topk_groups=kept,
        num_groups=groups,
        num_shared=0,
        routed_scaling_factor=1.5,
        **ranks,
        scoring=SCORINGS.index(scoring),
    )
    assert torch.equal(idx, wanted_idx)
    assert_close(weights, wanted_weights)


@pytest.mark.parametrize("shared", [1, 2])
def test_top2_sum_gate_with_everything(shared: int) -> None:
    logits, bias = random(301, 256), random(256)
    given = {
        "mask": flags(301) | flags(301),
        "fix_routing_mask": flags(301),
        "to_physical_map": integers(-1, 288, 256 + shared, 33).int(),
        "logical_count": integers(-1, 40, 256 + shared).int(),
        "unmapped_topk_idx": integers(-2, 258, 301, 11)[:, :8],
    }
    before = clones(given)
    idx, weights = v1.moe.top2_sum_gate(logits, bias, 8, 4, 8, True, shared, 1.5, 1, 4, 0, 2, "sigmoid", **given)
    picks, wanted_idx, wanted_weights = reference.top2_sum_gate(
        logits,
        bias,
        *(before[name] for name in TOP2),
        num_topk=8,
        num_topk_groups=4,
        num_groups=8,
        num_shared=shared,
        routed_scaling_factor=1.5,
        ep_rank=1,
        num_ep_ranks=4,
        tp_rank=0,
        num_tp_ranks=2,
        scoring=0,
    )
    assert torch.equal(idx, wanted_idx)
    assert torch.equal(given["unmapped_topk_idx"], picks)
    assert_close(weights, wanted_weights)


@pytest.mark.parametrize("scoring", SCORINGS)
def test_equal_logits_give_the_first_experts(scoring: str) -> None:
    logits, bias = torch.full((36, 256), 0.3, device="cuda"), torch.zeros(256, device="cuda")
    idx, _ = ops.moe.top2_sum_gate(logits, bias, 8, 4, 8, False, 0, 1.5, 0, 1, 0, 1, scoring)
    assert idx.tolist() == [list(range(8))] * 36


@pytest.mark.parametrize(("groups", "size"), [(1, 2), (4, 18), (8, 32), (12, 6), (16, 16), (32, 3), (31, 100)])
@pytest.mark.parametrize("width", [1, 2])
def test_topk_sum_and_topk_group_idx(groups: int, size: int, width: int) -> None:
    for scores in (random(97, groups, size), integers(-3, 4, 97, groups, size).float(), random(97, groups * size + 5)):
        view = scores if scores.dim() == 3 else scores[:, 5:].unflatten(1, (groups, size))
        kept = (groups + 1) // 2
        wanted = reference.topk_sum_and_topk_group_idx(view, num_topk_sum=width, num_topk_groups=kept)
        assert torch.equal(ops.moe.topk_sum_and_topk_group_idx(view, width, kept), wanted)


@pytest.mark.parametrize("k", [1, 2, 6, 7, 8, 9, 32])
def test_normalize_weight(k: int) -> None:
    weights = torch.rand(4001, k, device="cuda")
    for normalize, in_order in ((ops.moe.normalize_weight, 0), (v1.moe.normalize_weight, 1)):
        for got, wanted in zip(normalize(weights), reference.normalize_weight(weights, in_order=in_order), strict=True):
            assert torch.equal(got, wanted)


def test_normalisation_is_that_of_the_gates() -> None:
    logits = random(301, 72)
    scores = torch.empty_like(logits)
    idx, weights = ops.moe.moe_topk_gate_forward(logits, 6, False, 0, 1.0, 0, scores=scores)
    assert torch.equal(ops.moe.normalize_weight(scores.gather(1, idx))[1], weights)


@pytest.mark.parametrize("experts", [16, 33, 256, 1024])
@pytest.mark.parametrize("num_seqs", [0, 1, 3])
def test_backward(experts: int, num_seqs: int) -> None:
    wide = torch.rand(300, experts + 5, device="cuda") * 3 + 0.1
    scores, idx = wide[:, 5:], integers(-1, experts, 300, 9)[:, :8]
    weights, grad = torch.rand(300, 8, device="cuda"), random(300, 10)[:, 2:]
    aux = {"mask": flags(300), "grad_scores_sum": random(num_seqs, experts)} if num_seqs else {}
    wanted = reference.moe_topk_gate_backward(scores, idx, weights, grad, **aux, routed_scaling_factor=1.5)
    calls = [ops.moe.moe_topk_gate_backward(scores, idx, weights, grad, 1.5, **aux) for _ in range(3)]
    torch.testing.assert_close(calls[0], wanted, rtol=1e-4, atol=1e-5)
    assert all(torch.equal(call, calls[0]) for call in calls)
    out = torch.full_like(wanted, -7.0)
    assert ops.moe.moe_topk_gate_backward(scores, idx, weights, grad, 1.5, **aux, out=out).data_ptr() == out.data_ptr()
    assert torch.equal(out, calls[0])


@pytest.mark.parametrize("shared", [0, 1])
@pytest.mark.parametrize("mapped", [False, True])
@pytest.mark.parametrize("num_seqs", [None, 3])
def test_layer(shared: int, mapped: bool, num_seqs: int | None) -> None:
    logits = random(60, 72).requires_grad_()
    given: dict[str, Any] = {"mask": flags(60), "bias": random(72), "num_seqs": num_seqs}
    if mapped:
        given["to_physical_map"] = integers(0, 200, 72 + shared, 3).int()
        given["logical_count"] = integers(1, 4, 72 + shared).int()
    picks = torch.empty(60, 6, dtype=torch.int64, device="cuda")
    idx, weights, *sums = ops.modeling.moe.moe_topk_gate(logits, 6, shared > 0, shared, 1.5, 0, **given, unmapped_topk_idx=picks)
    factors = [random(*weights.shape), *(random(*tensor.shape) for tensor in sums)]
    sum((tensor * factor).sum() for tensor, factor in zip([weights, *sums], factors, strict=True)).backward()

    x = logits.detach().double().requires_grad_()
    scores = torch.nn.functional.softplus(x).sqrt()
    picked = scores.gather(1, picks.clamp(min=0))
    mask = given["mask"].view(-1, 1)
    routed = torch.where(mask, picked / picked.sum(-1, keepdim=True) * 1.5, 0.0)
    loss = (routed * factors[0][:, :6]).sum()
    if sums:
        shares = torch.where(mask, scores / scores.sum(-1, keepdim=True), 0.0).view(3, 20, 72).sum(1)
        torch.testing.assert_close(sums[0].double(), shares, rtol=1e-5, atol=1e-6)
        loss = loss + (shares * factors[1]).sum()
    loss.backward()
    assert not idx.requires_grad
    torch.testing.assert_close(logits.grad, x.grad.float(), rtol=1e-4, atol=1e-5)


def test_layer_with_random_routing_and_without_gradient() -> None:
    logits, force_random = random(60, 72).requires_grad_(), flags(60)
    _, weights = ops.modeling.moe.moe_topk_gate(logits, 6, False, 0, 1.5, 0, force_random=force_random)
    weights.sum().backward()
    assert logits.grad.isfinite().all()
    assert not logits.grad[force_random].any()
    with torch.no_grad():
        assert not ops.modeling.moe.moe_topk_gate(logits, 6, False, 0, 1.5, 0)[1].requires_grad


def test_no_tokens_launch_nothing() -> None:
    before = native().launch_count()
    empty, bias = torch.empty(0, 72, device="cuda"), torch.zeros(72, device="cuda")
    idx, weights = ops.moe.moe_topk_gate_forward(empty, 6, True, 2, 1.5, 0)
    assert (idx.shape, weights.shape) == ((0, 8), (0, 8))
    assert ops.moe.top2_sum_gate(empty, bias, 6, 4, 8, False, 0, 1.5, 0, 1, 0, 1, "sigmoid")[0].shape == (0, 6)
    assert ops.moe.topk_sum_and_topk_group_idx(empty.view(0, 8, 9), 2, 4).shape == (0, 4)
    assert ops.moe.normalize_weight(empty[:, :6].contiguous())[1].shape == (0, 6)
    none = torch.empty(0, 6, device="cuda")
    assert ops.moe.moe_topk_gate_backward(empty, none.long(), none, none, 1.5).shape == (0, 72)
    assert native().launch_count() == before


@pytest.mark.parametrize(
    "change",
    [
        {"scoring_func": "sigmoid"},
        {"num_topk": 0},
        {"num_topk": 33},
        {"num_topk": 73},
        {"num_shared_experts": 3},
        {"num_shared_experts": 0},
        {"num_topk": 31, "num_shared_experts": 2},
        {"ep_rank": -1},
        {"image_bias": lambda: random(72)},
        {"to_physical_map": lambda: integers(0, 9, 73, 2).int()},
        {"logical_count": lambda: integers(0, 9, 73).int()},
        {"to_physical_map": lambda: integers(0, 9, 73, 0).int(), "logical_count": lambda: integers(0, 9, 73).int()},
        {"to_physical_map": lambda: integers(0, 9, 72, 2).int(), "logical_count": lambda: integers(0, 9, 72).int()},
        {"fix_routing_mask": lambda: flags(5)},
        {"unmapped_topk_idx": lambda: integers(0, 9, 5, 7)},
        {"mask": lambda: flags(4)},
        {"mask": lambda: flags(5).int()},
        {"bias": lambda: random(71)},
        {"scores": lambda: random(5, 71)},
        {"logits": lambda: random(5, 70)},
        {"logits": lambda: random(5, 73)[:, :72]},
        {"logits": lambda: random(72, 5).T},
        {"logits": lambda: random(5, 72).half()},
        {"logits": lambda: random(5, 72).cpu()},
        {"logits": lambda: random(5, 1028)},
    ],
)
def test_calls_outside_the_contract_are_refused(change: dict[str, Any]) -> None:
    made = {name: value() if callable(value) else value for name, value in change.items()}
    given: dict[str, Any] = {"num_topk": 6, "use_shared_as_routed": True, "num_shared_experts": 1}
    given |= {"routed_scaling_factor": 1.5, "ep_rank": 0, "logits": random(5, 72), **made}
    before = native().launch_count()
    with pytest.raises((ArgumentError, NoVariantError)):
        ops.moe.moe_topk_gate_forward(**given)
    assert native().launch_count() == before


@pytest.mark.parametrize(
    "change",
    [
        {"scoring_func": "identity"},
        {"num_groups": 0},
        {"num_topk_groups": 9},
        {"num_topk_groups": 5, "num_groups": 5},
        {"num_groups": 36, "num_topk_groups": 18},
        {"num_groups": 2, "num_topk_groups": 1},
        {"num_topk_groups": 1, "num_topk": 10},
        {"num_ep_ranks": 0},
        {"num_ep_ranks": 73},
        {"tp_rank": 1},
        {"use_shared_as_routed": True, "num_shared_experts": 1},
    ],
)
def test_calls_of_release_1_outside_the_contract_are_refused(change: dict[str, Any]) -> None:
    given: dict[str, Any] = {"num_topk": 6, "num_topk_groups": 4, "num_groups": 8, "use_shared_as_routed": False}
    given |= {"num_shared_experts": 0, "routed_scaling_factor": 1.5, "ep_rank": 0, "num_ep_ranks": 1, "tp_rank": 0}
    given |= {"num_tp_ranks": 1, "scoring_func": "sigmoid", **change}
    before = native().launch_count()
    with pytest.raises((ArgumentError, NoVariantError)):
        ops.moe.top2_sum_gate(random(5, 72), random(72), **given)
    assert native().launch_count() == before


def test_other_calls_outside_the_contract_are_refused() -> None:
    scores, idx, weights = torch.rand(6, 72, device="cuda"), integers(0, 72, 6, 4), random(6, 4)
    before = native().launch_count()
    for call in (
        lambda: ops.moe.topk_sum_and_topk_group_idx(scores.view(6, 8, 9), 3, 4),
        lambda: ops.moe.topk_sum_and_topk_group_idx(scores.view(6, 72, 1), 1, 4),
        lambda: ops.moe.topk_sum_and_topk_group_idx(scores.view(6, 24, 3)[..., :1].contiguous(), 2, 4),
        lambda: ops.moe.topk_sum_and_topk_group_idx(scores.view(6, 8, 9), 2, 9),
        lambda: ops.moe.normalize_weight(scores),
        lambda: ops.moe.normalize_weight(scores[:, :6]),
        lambda: ops.moe.moe_topk_gate_backward(scores, idx, weights, weights, 1.5, mask=flags(6)),
        lambda: ops.moe.moe_topk_gate_backward(scores, idx, weights, weights, 1.5, mask=flags(6), grad_scores_sum=random(4, 72)),
        lambda: ops.moe.moe_topk_gate_backward(scores, idx, weights, weights, 1.5, mask=flags(6), grad_scores_sum=random(0, 72)),
        lambda: ops.moe.moe_topk_gate_backward(scores, idx.int(), weights, weights, 1.5),
        lambda: ops.moe.moe_topk_gate_backward(scores, idx, weights[:, :3], weights, 1.5),
        lambda: ops.modeling.moe.moe_topk_gate(scores, 4, False, 0, 1.5, 0, num_seqs=4),
    ):
        with pytest.raises((ArgumentError, NoVariantError)):
            call()
    assert native().launch_count() == before


def gate_call() -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    tensors = [random(7, 72), *[None] * 10]
    return torch.ops.tkbuild.moe_topk_gate_forward, tuple(tensors), {"num_topk": 6, "num_shared": 1}


def mutating_gate_call() -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    op, tensors, values = gate_call()
    return op, (*tensors[:9], integers(0, 9, 7, 6), random(7, 72)), values


OP_CALLS = {
    "forward": gate_call,
    "forward with tensors that it writes": mutating_gate_call,
    "backward": lambda: (
        torch.ops.tkbuild.moe_topk_gate_backward,
        (torch.rand(7, 72, device="cuda"), integers(0, 72, 7, 6), random(7, 6), random(7, 6), None, None),
        {"routed_scaling_factor": 1.5},
    ),
    "top2": lambda: (torch.ops.tkbuild.top2_sum_gate, (random(7, 72), random(72), *[None] * 5), {"num_topk": 6}),
    "groups": lambda: (
        torch.ops.tkbuild.topk_sum_and_topk_group_idx,
        (random(7, 8, 9),),
        {"num_topk_sum": 2, "num_topk_groups": 4},
    ),
    "normalisation": lambda: (torch.ops.tkbuild.normalize_weight, (torch.rand(7, 6, device="cuda"),), {"in_order": 1}),
}


@pytest.mark.parametrize("name", OP_CALLS)
def test_opcheck(name: str) -> None:
    op, tensors, values = OP_CALLS[name]()
    opcheck(op, tensors, values)

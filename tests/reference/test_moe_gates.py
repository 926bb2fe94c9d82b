"""The references of the gates of experts, against values written out by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from tkbuild.reference import moe
from tkbuild.reference.moe import gate_rules as rules

NAN, INF = math.nan, math.inf


def row(*values: float, experts: int = 8) -> torch.Tensor:
    """One token, with minus infinity behind ``values``."""
    return torch.tensor([[*values, *[-INF] * (experts - len(values))]])


def sqrt_softplus(x: float) -> float:
    return math.sqrt(x if x > 20 else math.log1p(math.exp(x)))


def forward(logits: torch.Tensor, **changed: Any) -> tuple[torch.Tensor, ...]:
    given: dict[str, Any] = {"num_topk": 2, "num_shared": 0, "routed_scaling_factor": 1.0, "ep_rank": 0, **changed}
    return moe.moe_topk_gate_forward(logits, **given)


def top2(logits: torch.Tensor, bias: torch.Tensor | None = None, **changed: Any) -> tuple[torch.Tensor, ...]:
    given: dict[str, Any] = {"num_topk": 2, "num_topk_groups": 0, "num_groups": 0, "num_shared": 0, "routed_scaling_factor": 1.0}
    given |= {"ep_rank": 0, "num_ep_ranks": 1, "tp_rank": 0, "num_tp_ranks": 1, "scoring": rules.SIGMOID, **changed}
    return moe.top2_sum_gate(logits, torch.zeros(logits.shape[1]) if bias is None else bias, **given)


# ---- rules


def test_keys_order_like_scores() -> None:
    ascending = torch.tensor([NAN, -INF, -3e38, -1.0, -(2.0**-149), 0.0, 2.0**-149, 1.0, 3e38, INF])
    keys = rules.ranking_keys(ascending).tolist()
    assert keys == sorted(set(keys))
    assert keys[0] > rules.NO_EXPERT_KEY
    assert rules.ranking_keys(torch.tensor([-0.0, -NAN])).tolist() == rules.ranking_keys(torch.tensor([0.0, NAN])).tolist()


@pytest.mark.parametrize("seed", [0, 1])
def test_keys_order_like_topk_gate(seed: int) -> None:
    values = torch.tensor([NAN, INF, -INF, 0.0, -0.0, 1.0, -1.0])
    scores = values[torch.randint(7, (100, 36), generator=torch.Generator().manual_seed(seed))]
    assert torch.equal(rules.ranked(rules.ranking_keys(scores), 8), moe.topk_gate(scores, num_topk=8))


@pytest.mark.parametrize(
    ("scoring", "x", "score"),
    [
        (rules.SIGMOID, 0.0, 0.5),
        (rules.SIGMOID, INF, 1.0),
        (rules.SIGMOID, -INF, 0.0),
        (rules.SQRT_SOFTPLUS, 0.0, math.sqrt(math.log(2.0))),
        (rules.SQRT_SOFTPLUS, 25.0, 5.0),
        (rules.SQRT_SOFTPLUS, 400.0, 20.0),
        (rules.SQRT_SOFTPLUS, -INF, 0.0),
        (rules.SQRT_SOFTPLUS, INF, INF),
    ],
)
def test_scoring_functions(scoring: int, x: float, score: float) -> None:
    assert rules.scores_of(torch.tensor([[x]]), scoring).item() == pytest.approx(score, rel=1e-6)


def test_softmax() -> None:
    scores = rules.scores_of(torch.tensor([[math.log(3.0) + 90, 90.0, -INF]]), rules.SOFTMAX)
    torch.testing.assert_close(scores, torch.tensor([[0.75, 0.25, 0.0]]))
    assert rules.scores_of(torch.tensor([[NAN, 1.0]]), rules.SOFTMAX).isnan().all()


@pytest.mark.parametrize(
    ("seed", "sequence", "words"),
    [
        (0, 0, (0x6627E8D5, 0xE169C58D)),  # the known answer that the authors of Philox publish
        (0x3F, 0, None),
        (0, 2**40 + 7, None),
    ],
)
def test_philox(seed: int, sequence: int, words: tuple[int, int] | None) -> None:
    counter, key = [0, 0, sequence & 0xFFFFFFFF, sequence >> 32], [seed, 0]
    for _ in range(10):
        (high0, low0), (high1, low1) = divmod(0xD2511F53 * counter[0], 2**32), divmod(0xCD9E8D57 * counter[2], 2**32)
        counter = [high1 ^ counter[1] ^ key[0], low1, high0 ^ counter[3] ^ key[1], low0]
        key = [(key[0] + 0x9E3779B9) % 2**32, (key[1] + 0xBB67AE85) % 2**32]
    got = rules.philox(seed, torch.tensor([sequence]))
    assert (got[0].item(), got[1].item()) == (counter[0], counter[1])
    assert words is None or words == (counter[0], counter[1])


@pytest.mark.parametrize(("slots", "limit"), [(1, 1), (3, 3), (8, 9), (32, 32), (32, 300)])
def test_random_experts_are_different_and_in_range(slots: int, limit: int) -> None:
    experts, weights = rules.random_experts(300, slots, limit, 5, torch.device("cpu"))
    assert all(len(set(numbers)) == slots for numbers in experts.tolist())
    assert experts.min() >= 0
    assert experts.max() < limit
    assert weights.min() > 0
    assert weights.max() <= 1
    assert torch.equal(experts, rules.random_experts(300, slots, limit, 5, torch.device("cpu"))[0])


def test_numbers_become_unique() -> None:
    # First row: slot 1 is final first, and slot 2 moves up to 1; slot 0 is before it on ties, so it moves up to 2.
    assert rules._made_unique(torch.tensor([[1, 0, 0], [2, 2, 2], [0, 0, 0]])).tolist() == [[1, 0, 2], [2, 3, 4], [0, 1, 2]]


# ---- groups


@pytest.mark.parametrize(
    ("why", "scores", "width", "groups"),
    [
        ("the two largest count", [[1.0, 5.0, 1.0], [4.0, 4.0, 0.0], [6.0, 0.0, 0.0]], 2, [1, 0, 2]),
        ("the largest counts", [[1.0, 5.0, 1.0], [4.0, 4.0, 0.0], [6.0, 0.0, 0.0]], 1, [2, 0, 1]),
        ("the largest may stand twice", [[3.0, 3.0, 0.0], [5.0, 0.5, 0.5], [0.0, 0.0, 0.0]], 2, [0, 1, 2]),
        ("ties to the smaller index", [[1.0, 2.0, 0.0], [3.0, 0.0, -1.0], [2.0, 1.0, 1.0]], 2, [0, 1, 2]),
        ("both zeros are equal", [[-0.0, -0.0, -1.0], [0.0, 0.0, -1.0], [0.0, -0.0, -1.0]], 2, [0, 1, 2]),
        ("NaN is the smallest of a group", [[NAN, 1.0, 1.0], [1.5, 1.5, NAN], [0.0, 0.0, 0.0]], 2, [1, 0, 2]),
        ("a sum with NaN is below minus infinity", [[NAN, NAN, 9.0], [-INF, -INF, -INF], [INF, -INF, NAN]], 2, [1, 0, 2]),
    ],
)
def test_groups(why: str, scores: list[list[float]], width: int, groups: list[int]) -> None:
    for count in (1, 2, 3):
        got = moe.topk_sum_and_topk_group_idx(torch.tensor([scores]), num_topk_sum=width, num_topk_groups=count)
        assert got.tolist() == [groups[:count]], why
        assert got.dtype == torch.int64


# ---- the gate of release 2.1


def test_weights_are_unbiased_and_scaled() -> None:
    logits, bias = row(1.0, 2.0, 3.0), torch.tensor([10.0, 0, 0, 0, 0, 0, 0, 0])
    idx, weights = forward(logits, bias=bias, routed_scaling_factor=2.5)
    assert idx.tolist() == [[0, 2]]
    one, three = sqrt_softplus(1.0), sqrt_softplus(3.0)
    assert weights[0].tolist() == pytest.approx([2.5 * one / (one + three), 2.5 * three / (one + three)], rel=1e-6)
    assert (idx.dtype, weights.dtype) == (torch.int64, torch.float32)


def test_shared_experts_stand_behind_with_weight_1() -> None:
    idx, weights = forward(row(1.0, 2.0), num_shared=2, routed_scaling_factor=3.0)
    assert idx.tolist() == [[1, 0, 8, 9]]
    assert weights[0, 2:].tolist() == [1.0, 1.0]


def test_scores_of_zero_have_weight_zero() -> None:
    idx, weights = forward(row())
    assert idx.tolist() == [[0, 1]]
    assert weights.tolist() == [[0.0, 0.0]]


def test_a_nan_is_picked_last_and_makes_nan() -> None:
    idx, weights = forward(torch.tensor([[NAN, 1.0, NAN, NAN]]))
    assert idx.tolist() == [[1, 0]]
    assert weights.isnan().all()


def test_masks_images_and_fixed_routing() -> None:
    logits = row(1.0, 2.0, 3.0).repeat(4, 1)
    unmapped = torch.tensor([[5, 6], [5, 6], [5, 6], [0, 8]])
    scores = torch.ones_like(logits)
    picks, saved, idx, weights = forward(
        logits,
        mask=torch.tensor([False, True, True, True]),
        image_bias=torch.tensor([0.0, 0, 0, 0, 9, 9, 0, 0]),
        image_token_mask=torch.tensor([False, True, False, False]),
        fix_routing_mask=torch.tensor([True, False, False, True]),
        unmapped_topk_idx=unmapped,
        scores=scores,
    )
    assert idx.tolist() == [[-1, -1], [4, 5], [2, 1], [0, -1]]
    assert picks.tolist() == [[-1, -1], [4, 5], [2, 1], [0, 8]]
    assert weights[[0, 1, 3]].tolist() == [[0, 0], [0, 0], [1, 0]]
    assert saved[0].tolist() == [0.0] * 8
    assert saved[1, 1].item() == pytest.approx(sqrt_softplus(2.0), rel=1e-6)


def test_tokens_take_turns_through_copies() -> None:
    physical = torch.arange(24, dtype=torch.int32).view(8, 3)
    counts = torch.tensor([1, 2, 3, 0, 9, -1, 1, 1], dtype=torch.int32)
    logits = row(0.0, 2.0, 1.0).repeat(5, 1)
    picks = torch.zeros(5, 2, dtype=torch.int64)
    picks, idx, _ = forward(logits, to_physical_map=physical, logical_count=counts, unmapped_topk_idx=picks, ep_rank=2)
    turns = [2 + 23333 * token for token in range(5)]
    assert idx.tolist() == [[3 + turn % 2, 6 + turn % 3] for turn in turns]
    assert picks.tolist() == [[1, 2]] * 5
    limited = rules.limited_counts(physical, counts)
    assert limited.tolist() == [1, 2, 3, 1, 3, 1, 1, 1]


def test_turns_of_late_tokens_are_not_cut_to_32_bits() -> None:
    physical, counts = torch.arange(14, dtype=torch.int32).view(2, 7), torch.tensor([7, 7])
    got = rules.physical_experts(torch.zeros(100_000, 1, dtype=torch.int64), physical, counts, 0)
    assert got[99_999].item() == 99_999 * 23333 % 7


def test_random_routing_is_below_the_mask_and_above_fixed_routing() -> None:
    logits = row(1.0, 2.0).repeat(3, 1)
    picks, scores, idx, weights = forward(
        logits,
        mask=torch.tensor([False, True, True]),
        force_random=torch.tensor([True, True, False]),
        fix_routing_mask=torch.ones(3, dtype=torch.bool),
        unmapped_topk_idx=torch.tensor([[3, 4]] * 3),
        scores=torch.ones_like(logits),
        num_shared=1,
        ep_rank=7,
    )
    experts, random_weights = rules.random_experts(3, 3, 9, 7, torch.device("cpu"))
    assert idx.tolist() == [[-1] * 3, experts[1].tolist(), [3, 4, 8]]
    assert torch.equal(weights[1], random_weights[1])
    assert picks.tolist() == [[-1, -1], [-1, -1], [3, 4]]
    assert scores.any(-1).tolist() == [False, False, True]


def test_no_tokens() -> None:
    idx, weights = forward(torch.empty(0, 8), num_shared=1)
    assert (idx.shape, weights.shape) == ((0, 3), (0, 3))


# ---- the gate of release 1.0


def test_softmax_ranks_by_logits_and_weighs_by_probabilities() -> None:
    logits = torch.tensor([[0.0, math.log(2.0), math.log(4.0), 0.0]])
    idx, weights = top2(logits, torch.tensor([5.0, 0.0, 0.0, 0.0]), scoring=rules.SOFTMAX)
    assert idx.tolist() == [[0, 2]]
    torch.testing.assert_close(weights, torch.tensor([[0.2, 0.8]]))


def test_only_experts_of_the_best_groups_remain() -> None:
    logits = torch.tensor([[9.0, -9.0, 3.0, 3.0, 4.0, 1.0, -9.0, -9.0]])
    kept = {"num_groups": 4, "num_topk_groups": 2, "scoring": rules.SOFTMAX}
    assert top2(logits, **kept)[0].tolist() == [[4, 2]]
    assert top2(logits, **{**kept, "num_topk_groups": 4})[0].tolist() == [[0, 4]]


def test_equal_logits_give_the_first_experts() -> None:
    for scoring in (rules.SIGMOID, rules.SQRT_SOFTPLUS, rules.SOFTMAX):
        idx, _ = top2(torch.full((1, 16), 0.3), num_topk=4, num_groups=4, num_topk_groups=2, scoring=scoring)
        assert idx.tolist() == [[0, 1, 2, 3]]


def test_experts_of_other_ranks_become_minus_1_and_keep_their_weights() -> None:
    # Ranks of two experts, two of which work together: rank 1 of each pair has experts 2, 3, 6, 7, numbered 0 to 3.
    logits = torch.tensor([[1.0, 0, 5, 0, 0, 4, 3, 2]])
    idx, weights = top2(logits, num_topk=5, num_ep_ranks=4, tp_rank=1, num_tp_ranks=2)
    assert idx.tolist() == [[0, -1, 2, 3, -1]]
    assert (weights > 0).all()


def test_the_columns_of_a_map_add_physical_experts() -> None:
    physical = torch.arange(8, dtype=torch.int32).view(8, 1).repeat(1, 3)
    logits = torch.tensor([[0.0, 0, 0, 0, 9, 8, 0, 0]])
    idx, _ = top2(logits, to_physical_map=physical, logical_count=torch.full((8,), 3), num_ep_ranks=2, tp_rank=0, num_tp_ranks=2)
    assert idx.tolist() == [[4, -1]]  # 10 experts, 5 a rank


def test_masked_tokens_of_release_1() -> None:
    unmapped = torch.tensor([[3, 4], [3, 4]])
    mask = torch.tensor([True, False])
    picks, idx, weights = top2(row(2.0, 1.0).repeat(2, 1), mask=mask, unmapped_topk_idx=unmapped)
    assert picks.tolist() == idx.tolist() == [[0, 1], [-1, -1]]
    assert weights[1].tolist() == [0.0, 0.0]


# ---- normalisation


def test_orders_of_sums() -> None:
    tiny = 2.0**-24
    weights = torch.tensor([[1.0, tiny, tiny, tiny, tiny, tiny]])
    in_pairs, _ = moe.normalize_weight(weights)
    in_order, normalized = moe.normalize_weight(weights, in_order=1)
    # 1 + t is 1; in pairs ((1 + t) + t) + ((t + t) + t) is 1 + 3 t, half way to the even 1 + 4 t.
    assert in_order.tolist() == [1.0]
    assert in_pairs.tolist() == [1.0 + 4 * tiny]
    assert normalized[0, 0].item() == 1.0


def test_normalisation_of_zeros_and_of_nan() -> None:
    denominator, normalized = moe.normalize_weight(torch.tensor([[0.0, 0.0, 0.0], [NAN, 1.0, 1.0]]))
    assert denominator[0].item() == torch.tensor(1e-20).item()
    assert normalized[0].tolist() == [0.0, 0.0, 0.0]
    assert normalized[1].isnan().all()


# ---- gradient


def gate64(x: torch.Tensor) -> torch.Tensor:
    return torch.log1p(torch.exp(x)).sqrt()


def random(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("num_seqs", [0, 1, 4])
def test_gradient_against_autograd(num_seqs: int) -> None:
    x = (random(12, 16) * 2).requires_grad_()
    scores = gate64(x)
    idx = moe.topk_gate(scores.float().detach(), num_topk=4)
    picked = scores.gather(1, idx)
    weights = picked / picked.sum(-1, keepdim=True) * 1.5
    grad, mask = random(12, 4, seed=2), torch.arange(12) % 3 > 0
    loss, sums = (weights * grad).sum(), None
    if num_seqs:
        sums = random(num_seqs, 16, seed=3)
        shares = torch.where(mask.view(-1, 1), scores / scores.sum(-1, keepdim=True), 0.0)
        loss = loss + (shares.view(num_seqs, -1, 16).sum(1) * sums).sum()
    loss.backward()
    got = moe.moe_topk_gate_backward(
        scores.detach().float(),
        idx,
        weights.detach().float(),
        grad.float(),
        mask if num_seqs else None,
        None if sums is None else sums.float(),
        routed_scaling_factor=1.5,
    )
    assert x.grad is not None
    torch.testing.assert_close(got, x.grad.float(), rtol=1e-5, atol=1e-6)


def test_slots_without_expert_are_ignored() -> None:
    scores = torch.tensor([[1.0, 2.0, 3.0, 4.0]])
    given = {"topk_weights": torch.tensor([[0.25, 0.75, NAN]]), "grad_topk_weights": torch.tensor([[1.0, 2.0, NAN]])}
    one = moe.moe_topk_gate_backward(scores, torch.tensor([[0, 2, -1]]), **given, routed_scaling_factor=1.0)
    other = moe.moe_topk_gate_backward(scores, torch.tensor([[0, 2, 4]]), **given, routed_scaling_factor=1.0)
    assert torch.equal(one, other)
    # dot = 1.75, D = 4: (1 - 1.75) / 4 and (2 - 1.75) / 4, times (1 - exp(-u * u)) / (2 u)
    wanted = [-0.1875 * (1 - math.exp(-1)) / 2, 0.0, 0.0625 * (1 - math.exp(-9)) / 6, 0.0]
    assert one[0].tolist() == pytest.approx(wanted, rel=1e-6)


def test_repeated_experts_add_up() -> None:
    scores = torch.tensor([[1.0, 2.0]])
    grad = moe.moe_topk_gate_backward(
        scores, torch.tensor([[0, 0]]), torch.tensor([[0.5, 0.5]]), torch.tensor([[1.0, 2.0]]), routed_scaling_factor=2.0
    )
    # dot = 1.5, D = 2: (2 - 1.5) / 2 + (4 - 1.5) / 2
    assert grad[0].tolist() == pytest.approx([1.5 * (1 - math.exp(-1)) / 2, 0.0], rel=1e-6)


def test_scores_of_zero_have_no_gradient() -> None:
    zeros, none = torch.zeros(2, 4), torch.full((2, 1), -1)
    grad = moe.moe_topk_gate_backward(
        zeros, none, torch.ones(2, 1), torch.ones(2, 1), None, torch.ones(1, 4), routed_scaling_factor=1.0
    )
    assert grad.tolist() == zeros.tolist()

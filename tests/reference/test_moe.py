"""The references of the mixture-of-experts kernels, against values written out by hand."""

from __future__ import annotations

import math

import pytest
import torch

from tkbuild.reference.moe import topk_gate

NAN, INF = math.nan, math.inf


@pytest.mark.parametrize(
    ("why", "row", "picked"),
    [
        ("descending order", [0.1, 0.9, 0.5, 0.7], [1, 3, 2, 0]),
        ("ties to the smaller index", [1.0, 2.0, 2.0, 1.0], [1, 2, 0, 3]),
        ("both zeros are equal", [-0.0, 0.0, -0.0, -1.0], [0, 1, 2, 3]),
        ("infinities are ordinary numbers", [-INF, INF, 0.0, INF], [1, 3, 2, 0]),
        ("NaN is below minus infinity", [NAN, -INF, NAN, 3.0], [3, 1, 0, 2]),
        ("all NaN", [NAN, NAN, NAN, NAN], [0, 1, 2, 3]),
        ("a negative NaN ranks like any other", [-NAN, -INF, NAN, 0.0], [3, 1, 0, 2]),
        ("subnormal numbers differ from zero", [0.0, 2.0**-149, -(2.0**-149), 2.0**-148], [3, 1, 0, 2]),
    ],
)
@pytest.mark.parametrize("num_topk", [1, 3, 4])
def test_order(why: str, row: list[float], picked: list[int], num_topk: int) -> None:
    out = topk_gate(torch.tensor([row, row]), num_topk=num_topk)
    assert out.tolist() == [picked[:num_topk]] * 2, why
    assert out.dtype == torch.int64


def test_indices_are_distinct_and_in_range_for_any_input() -> None:
    values = torch.tensor([NAN, INF, -INF, 0.0, -0.0, 1.0])
    scores = values[torch.randint(6, (200, 72), generator=torch.Generator().manual_seed(0))]
    out = topk_gate(scores, num_topk=8)
    assert all(len(set(row)) == 8 for row in out.tolist())
    assert out.min() >= 0
    assert out.max() < 72


def test_equals_a_stable_descending_sort_of_numbers() -> None:
    scores = torch.randint(-3, 4, (50, 36), generator=torch.Generator().manual_seed(1)).float()
    by_score = [sorted((-score, index) for index, score in enumerate(row)) for row in scores.tolist()]
    assert topk_gate(scores, num_topk=6).tolist() == [[index for _, index in row[:6]] for row in by_score]


def test_no_rows() -> None:
    assert topk_gate(torch.empty(0, 72), num_topk=6).shape == (0, 6)


def test_the_scores_are_left_alone() -> None:
    scores = torch.tensor([[NAN, 1.0]])
    topk_gate(scores, num_topk=1)
    assert math.isnan(scores[0, 0])

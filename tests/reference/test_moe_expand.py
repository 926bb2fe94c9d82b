"""The references of expansion and reduction against bits computed by hand, and what holds for any mapping."""

from __future__ import annotations

import math
import struct
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tkbuild.reference import moe

NAN, INF = math.nan, math.inf
ROWS = st.lists(st.integers(-2, 9), max_size=40)


def float_of(bits: int) -> float:
    return float(struct.unpack("<f", struct.pack("<I", bits))[0])


def bits_of(values: torch.Tensor) -> list[int]:
    return [word & 0xFFFFFFFF for word in values.contiguous().view(torch.int32).flatten().tolist()]


def reduce(
    x: torch.Tensor,
    rows: list[list[int]],
    weights: list[list[float]] | None = None,
    x_sf: list[float] | None = None,
    sf: float | None = None,
    out_dtype: str = "float32",
) -> torch.Tensor:
    return moe.reduce_fused(
        x,
        None if x_sf is None else torch.tensor(x_sf),
        None if weights is None else torch.tensor(weights),
        torch.tensor(rows, dtype=torch.int32),
        None if sf is None else torch.tensor([sf]),
        out_dtype=out_dtype,
    )


def mapping_of(topk_idx: torch.Tensor, num_experts: int, alignment: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (token_topk_to_pos, pos_to_expert)."""
    num_rows = topk_idx.numel() + num_experts * alignment
    row_maps = torch.empty((3, num_rows), dtype=torch.int32)
    pairs = torch.empty(topk_idx.shape, dtype=torch.int32)
    of_rows, of_pairs, _ = moe.get_fused_mapping(topk_idx, row_maps, pairs, num_experts=num_experts, alignment=alignment)
    return of_pairs, of_rows[0]


# ---- expand


def test_an_expansion_written_out() -> None:
    x, x_sf = torch.tensor([[1, 2], [3, 4]]), torch.tensor([[10], [20]])
    rows = torch.tensor([[4, 0], [-1, 2]], dtype=torch.int32)
    experts = torch.tensor([0, -1, 1, 1, 2], dtype=torch.int32)
    out, out_sf = torch.full((5, 2), 7), torch.full((5, 1), 70)
    expanded, expanded_sf = moe.expand_to_fused(x, rows, experts, x_sf, out, out_sf)
    assert expanded.tolist() == [[1, 2], [0, 0], [3, 4], [7, 7], [1, 2]]
    assert expanded_sf.tolist() == [[10], [0], [20], [70], [10]]
    assert out.tolist() == [[7, 7]] * 5


def test_rows_out_of_range_are_left_out() -> None:
    x, out = torch.tensor([[1.0]]), torch.full((2, 1), 7.0)
    rows = torch.tensor([[2, -5, 2**31 - 1, 1]], dtype=torch.int32)
    experts = torch.zeros(2, dtype=torch.int32)
    assert moe.expand_to_fused(x, rows, experts, None, out, None).tolist() == [[7.0], [1.0]]


def test_without_tokens_padding_is_still_zero() -> None:
    empty, rows = torch.empty(0, 3), torch.empty((0, 2), dtype=torch.int32)
    expanded = moe.expand_to_fused(empty, rows, torch.tensor([-1, 4], dtype=torch.int32), None, torch.full((2, 3), 7.0), None)
    assert expanded.tolist() == [[0.0] * 3, [7.0] * 3]


@given(ROWS, st.integers(1, 5), st.integers(1, 8), st.integers(1, 5), st.integers(0, 2**32 - 1))
@settings(max_examples=50, deadline=None)
def test_expand_then_reduce_multiplies_by_the_number_of_slots(
    values: list[int], k: int, num_experts: int, alignment: int, seed: int
) -> None:
    topk_idx = torch.tensor(values[: len(values) // k * k], dtype=torch.int64).view(-1, k)
    rows, experts = mapping_of(topk_idx, num_experts, alignment)
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(-99, 99, (topk_idx.shape[0], 16), generator=generator).float()
    out = torch.full((experts.shape[0], 16), NAN)
    expanded = moe.expand_to_fused(x, rows, experts, None, out, None)
    assert torch.equal(expanded[experts < 0], torch.zeros(int((experts < 0).sum()), 16))
    slots = ((topk_idx >= 0) & (topk_idx < num_experts)).sum(dim=1, keepdim=True)
    for weights in (None, torch.ones(rows.shape)):
        assert torch.equal(moe.reduce_fused(expanded, None, weights, rows, None, out_dtype="float32"), x * slots)


# ---- reduce


def test_a_sum_written_out() -> None:
    x = torch.tensor([[1.0, -2.0], [10.0, 20.0], [100.0, 200.0]])
    assert reduce(x, [[2, -1, 0], [-1, -1, -1], [1, 1, 3]]).tolist() == [[101.0, 198.0], [0.0, 0.0], [20.0, 40.0]]
    weighted = reduce(x, [[2, -1, 0]], weights=[[0.5, NAN, 3.0]])
    assert weighted.tolist() == [[53.0, 94.0]]
    assert reduce(x, [[2, 0]], weights=[[0.5, 3.0]], x_sf=[2.0, NAN, 4.0]).tolist() == [[206.0, 388.0]]
    assert reduce(x, [[2, 0]], x_sf=[2.0, NAN, 4.0]).tolist() == [[402.0, 796.0]]


def test_products_are_not_rounded_before_they_are_added() -> None:
    """(1 + 2**-23)**2 - (1 + 2**-22) is 2**-46; with the product rounded first it would be 0."""
    x = torch.tensor([[float_of(0x3F800002)], [float_of(0x3F800001)]])
    sums = reduce(x, [[0, 1]], weights=[[-1.0, float_of(0x3F800001)]])
    assert sums.tolist() == [[2.0**-46]]


def test_the_factor_is_rounded_before_it_multiplies() -> None:
    """(1 + 2**-12)**2 rounds to 1 + 2**-11, and 1.5 times that is exact; 1.5 times the square would be one unit more."""
    root = float_of(0x3F800800)
    assert bits_of(reduce(torch.tensor([[1.5]]), [[0]], weights=[[root]], x_sf=[root])) == [0x3FC01800]


def test_slots_are_added_in_their_order() -> None:
    x = torch.tensor([[2.0**24], [1.0], [-(2.0**24)]])
    assert reduce(x, [[0, 1, 2], [0, 2, 1], [1, 0, 2]]).flatten().tolist() == [0.0, 1.0, 0.0]


@pytest.mark.parametrize(("a", "b", "c"), [(0x3F800001, 0x3F7FFFFF, 0x33000000), (0x00000001, 0x3F000001, 0x00000002)])
def test_sums_are_rounded_once(a: int, b: int, c: int) -> None:
    """Against exact fractions, near ties of normal and of subnormal numbers, where rounding twice would differ."""
    x = torch.tensor([[float_of(c)], [float_of(a)]])
    found = reduce(x, [[0, 1]], weights=[[1.0, float_of(b)]])
    exact = Fraction(float_of(a)) * Fraction(float_of(b)) + Fraction(float_of(c))
    assert bits_of(found) == [nearest(exact)]


@given(st.integers(0, 0x7F7FFFFF), st.integers(0, 0x7F7FFFFF), st.integers(0, 0x7F7FFFFF), st.booleans())
@settings(max_examples=300, deadline=None)
def test_sums_of_any_numbers_are_rounded_once(a: int, b: int, c: int, negative: bool) -> None:
    scale = -float_of(b) if negative else float_of(b)
    exact = Fraction(float_of(a)) * Fraction(scale) + Fraction(float_of(c))
    found = reduce(torch.tensor([[float_of(c)], [float_of(a)]]), [[0, 1]], weights=[[1.0, scale]])
    assert bits_of(found.abs()) == [nearest(abs(exact))]


def nearest(exact: Fraction) -> int:
    """The bits of the float32 nearest to ``exact``, not negative; ties to even."""
    low, high = 0, 0x7F800000
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if Fraction(float_of(middle)) <= exact else (low, middle)
    below = Fraction(float_of(low))
    above = Fraction(2) ** 128 if high == 0x7F800000 else Fraction(float_of(high))
    if exact - below == above - exact:
        return low if low % 2 == 0 else high
    return low if exact - below < above - exact else high


def test_zero_has_no_sign() -> None:
    assert bits_of(reduce(torch.tensor([[-0.0], [0.0]]), [[0, 1], [-1, -1]])) == [0, 0]


def test_nan_and_infinity_spread() -> None:
    x = torch.tensor([[NAN, INF, INF, 0.0, INF], [1.0, 1.0, -INF, 1.0, 1.0]])
    sums = reduce(x, [[0, 1]], weights=[[1.0, 1.0]])
    assert bits_of(sums) == [0x7FFFFFFF, 0x7F800000, 0x7FFFFFFF, 0x3F800000, 0x7F800000]
    assert bits_of(reduce(x[1:], [[0, -1]], weights=[[0.0, 1.0]])) == [0, 0, 0x7FFFFFFF, 0, 0]


def test_rounding_to_bfloat16() -> None:
    x = torch.tensor([[1.0, 1.0, NAN]]).bfloat16()
    sums = reduce(x, [[0, 0]], weights=[[1.0, 2.0**-8]], out_dtype="bfloat16")
    assert [word & 0xFFFF for word in sums.view(torch.int16).flatten().tolist()] == [0x3F80, 0x3F80, 0x7FFF]
    sums = reduce(x, [[0, 0]], weights=[[1.0, 3 * 2.0**-8]], out_dtype="bfloat16")
    assert [word & 0xFFFF for word in sums.view(torch.int16).flatten().tolist()] == [0x3F82, 0x3F82, 0x7FFF]


def test_e4m3_results_are_scaled_and_saturate() -> None:
    x = torch.tensor([[1.0, 300.0, -300.0, NAN, 0.0, -0.25]])
    codes = reduce(x, [[0]], sf=2.0, out_dtype="float8_e4m3fn").view(torch.uint8)
    assert codes.tolist() == [[0x40, 0x7E, 0xFE, 0x7F, 0x00, 0xB0]]


def test_shapes_without_tokens_rows_or_columns() -> None:
    empty = torch.empty((0, 4), dtype=torch.int32)
    assert moe.reduce_fused(torch.ones(3, 16), None, None, empty, None, out_dtype="float32").shape == (0, 16)
    assert reduce(torch.empty(0, 16), [[-1, 3]]).tolist() == [[0.0] * 16]

"""The references of routing against values written out by hand, and what holds for any ids."""

from __future__ import annotations

import struct

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tkbuild.reference import moe

ROWS = st.lists(st.integers(-3, 12), max_size=48)


def ids(values: list[int], k: int) -> torch.Tensor:
    """The values as (T, k), the last ones dropped where they do not fill a row."""
    return torch.tensor(values[: len(values) // k * k], dtype=torch.int64).view(-1, k)


def mapping(topk_idx: torch.Tensor, num_experts: int, num_rows: int, alignment: int) -> list[list]:
    row_maps = torch.full((3, num_rows), 77, dtype=torch.int32)
    pairs = torch.full(topk_idx.shape, 77, dtype=torch.int32)
    of_rows, of_pairs, segments = moe.get_fused_mapping(topk_idx, row_maps, pairs, num_experts=num_experts, alignment=alignment)
    assert {of_rows.dtype, of_pairs.dtype, segments.dtype} == {torch.int32}
    return [*of_rows.tolist(), of_pairs.tolist(), *segments.tolist()]


# ---- numbering


@pytest.mark.parametrize(
    ("tp_rank", "wanted"),
    [
        (0, [-1, 0, 1, -1, -1, 2, 3, -1, -1, 4]),
        (1, [-1, -1, -1, 0, 1, -1, -1, 2, 3, -1]),
        (2, [-1] * 10),
    ],
)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_blocks_go_to_ranks_in_turn(tp_rank: int, wanted: list[int], dtype: torch.dtype) -> None:
    indices = torch.arange(-1, 9, dtype=dtype).view(2, 5)
    masked = moe.mask_indices_by_tp(indices, experts_per_rank=2, tp_rank=tp_rank, num_tp_ranks=2)
    assert masked.dtype == dtype
    assert masked.flatten().tolist() == wanted


def test_any_negative_id_becomes_minus_one() -> None:
    indices = torch.tensor([[-1, -2, -(2**62), 2**62]])
    assert moe.mask_indices_by_tp(indices, experts_per_rank=3, tp_rank=0, num_tp_ranks=1).tolist() == [[-1, -1, -1, 2**62]]


@given(st.integers(1, 5), st.integers(1, 4), st.integers(1, 4))
@settings(max_examples=50, deadline=None)
def test_ranks_together_keep_every_id_once(per_rank: int, num_tp_ranks: int, rounds: int) -> None:
    indices = torch.arange(per_rank * num_tp_ranks * rounds)[None]
    kept = [
        moe.mask_indices_by_tp(indices, experts_per_rank=per_rank, tp_rank=rank, num_tp_ranks=num_tp_ranks)[0]
        for rank in range(num_tp_ranks)
    ]
    for rank_ids in kept:
        assert rank_ids[rank_ids >= 0].tolist() == list(range(per_rank * rounds))
    assert ((torch.stack(kept) >= 0).sum(dim=0) == 1).all()


# ---- counts


def test_counts() -> None:
    group_idx = torch.tensor([[0, 2, 2], [-1, 5, 2], [3, 4, -7]])
    counts = moe.group_count(group_idx, num_groups=5)
    assert (counts.dtype, counts.tolist()) == (torch.int32, [1, 0, 3, 1, 1])


def test_no_ids_count_nothing() -> None:
    empty = torch.empty((0, 4), dtype=torch.int64)
    assert moe.group_count(empty, num_groups=3).tolist() == [0, 0, 0]
    fractions = moe.aux_fi(empty, num_experts=3, num_aux_topk=2)
    assert (fractions.dtype, fractions.tolist()) == (torch.float32, [0.0, 0.0, 0.0])


def test_fractions_are_divided_once() -> None:
    """6 / 7 rounds to 0x3F5B6DB7; 6 times the rounded 1 / 7 would be 0x3F5B6DB8."""
    topk_idx = torch.tensor([[0], [0], [1], [2], [2], [2], [-1]])
    fractions = moe.aux_fi(topk_idx, num_experts=3, num_aux_topk=1)
    words = [struct.unpack("<I", struct.pack("<f", value))[0] for value in fractions.tolist()]
    assert words == [0x3F5B6DB7, 0x3EDB6DB7, 0x3FA49249]


@given(ROWS, st.integers(1, 6), st.integers(1, 14))
@settings(max_examples=50, deadline=None)
def test_counts_sum_up(values: list[int], k: int, num_groups: int) -> None:
    group_idx = ids(values, k)
    counts = moe.group_count(group_idx, num_groups=num_groups)
    assert int(counts.sum()) == int(((group_idx >= 0) & (group_idx < num_groups)).sum())
    assert counts.tolist() == [group_idx.flatten().tolist().count(group) for group in range(num_groups)]


# ---- repeats


def test_the_first_of_equal_ids_stays() -> None:
    rows = torch.tensor([[3, 1, 3, 1, 3], [-1, -1, 2, -2, 2], [4, 4, 4, 4, 4], [0, 1, 2, 3, 4]])
    before = rows.clone()
    unique = moe.inplace_unique_group_indices(rows)
    assert unique.tolist() == [[3, 1, -1, -1, -1], [-1, -1, 2, -2, -1], [4, -1, -1, -1, -1], [0, 1, 2, 3, 4]]
    assert torch.equal(rows, before)


@given(ROWS, st.integers(1, 6))
@settings(max_examples=50, deadline=None)
def test_rows_keep_each_id_once(values: list[int], k: int) -> None:
    for row, unique in zip(ids(values, k).tolist(), moe.inplace_unique_group_indices(ids(values, k)).tolist(), strict=True):
        assert [value for value in unique if value >= 0] == list(dict.fromkeys(value for value in row if value >= 0))
        assert all(new in (old, -1) for old, new in zip(row, unique, strict=True))


# ---- the mapping


def test_a_mapping_written_out() -> None:
    topk_idx = torch.tensor([[2, 0], [2, -1], [0, 2], [9, 2]])
    to_expert, to_token, to_pair, to_row, start, end, rows = mapping(topk_idx, 3, 9, 3)
    assert to_expert == [0, 0, -1, 2, 2, 2, 2, -1, -1]
    assert to_token == [0, 2, -1, 0, 1, 2, 3, -1, -1]
    assert to_pair == [1, 4, -1, 0, 2, 5, 7, -1, -1]
    assert to_row == [[3, 0], [4, -1], [1, 5], [-1, 6]]
    assert (start, end, rows) == ([0, 3, 3], [3, 3, 9], [3, 0, 6])


def test_rows_behind_the_last_segment_are_padding() -> None:
    to_expert, *_, rows = mapping(torch.tensor([[0, 1]]), 2, 6, 2)
    assert (to_expert, rows) == ([0, -1, 1, -1, -1, -1], [2, 2])


def test_pairs_beyond_the_rows_are_left_out() -> None:
    to_expert, _, _, to_row, start, _, rows = mapping(torch.tensor([[0, 1], [0, 1]]), 2, 3, 2)
    assert (to_expert, to_row) == ([0, 0, 1], [[0, 2], [1, -1]])
    assert (start, rows) == ([0, 2], [2, 2])


def test_no_tokens_map_nothing() -> None:
    to_expert, _, _, to_row, start, end, rows = mapping(torch.empty((0, 4), dtype=torch.int64), 3, 2, 128)
    assert (to_expert, to_row, start, end, rows) == ([-1, -1], [], [0, 0, 0], [0, 0, 0], [0, 0, 0])


@given(ROWS, st.integers(1, 6), st.integers(1, 10), st.integers(1, 9), st.integers(0, 5))
@settings(max_examples=100, deadline=None)
def test_a_mapping_is_a_permutation_with_padding(values: list[int], k: int, num_experts: int, alignment: int, spare: int) -> None:
    topk_idx = ids(values, k)
    flat = topk_idx.flatten().tolist()
    counts = [flat.count(expert) for expert in range(num_experts)]
    padded = [-(-count // alignment) * alignment for count in counts]
    num_rows = sum(padded) + spare
    to_expert, to_token, to_pair, to_row, start, end, rows = mapping(topk_idx, num_experts, num_rows, alignment)
    assert rows == padded
    assert [b - a for a, b in zip(start, end, strict=True)] == padded
    assert start == [sum(padded[:expert]) for expert in range(num_experts)]
    seen = [pair for pair in to_pair if pair >= 0]
    assert sorted(seen) == [pair for pair, expert in enumerate(flat) if 0 <= expert < num_experts]
    placed = [row for rows_of_token in to_row for row in rows_of_token]
    for row, pair in enumerate(to_pair):
        if pair < 0:
            assert (to_expert[row], to_token[row]) == (-1, -1)
        else:
            assert (to_expert[row], to_token[row], placed[pair]) == (flat[pair], pair // k, row)
    assert sum(row >= 0 for row in placed) == len(seen)
    for expert, first in enumerate(start):
        segment = to_pair[first : first + padded[expert]]
        assert segment == sorted(segment[: counts[expert]]) + [-1] * (padded[expert] - counts[expert])
    assert to_pair[sum(padded) :] == [-1] * spare

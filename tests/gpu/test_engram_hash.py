"""The hashed n-gram indices on a GPU, against the reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gpu_checks import on_gpu_with, opcheck, same

from tkbuild import ops, reference
from tkbuild.errors import ArgumentError, NoVariantError
from tkbuild.ops import v1
from tkbuild.runtime.launcher import native

pytestmark = on_gpu_with("engram.ngram_hash")


def integers(low: int, high: int, *shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.randint(low, high, shape, device="cuda", dtype=dtype)


def inputs(tokens: int, n: int = 3, layers: int = 2, tables: int = 8) -> tuple[torch.Tensor, ...]:
    sizes = integers(100_000, 1_000_000, layers, n - 1, tables)
    ids, multipliers = integers(0, 100_000, tokens, n), integers(0, 100_000, layers, n, dtype=torch.int64)
    return ids, multipliers, sizes, ops.engram.make_offsets(sizes)


@pytest.mark.parametrize("tokens", [1, 512, 8001])
@pytest.mark.parametrize("masked", [False, True])
def test_indices(tokens: int, masked: bool) -> None:
    given = inputs(tokens)
    mask = torch.rand(tokens, device="cuda") < 0.3 if masked else None
    out = ops.engram.engram_hash(*given, mask)
    assert same(out, reference.engram.ngram_hash(*given, mask))
    if not masked:
        assert same(v1.engram.engram_hash(*given), out)


def test_offsets_are_sums_of_the_sizes_before() -> None:
    sizes = torch.tensor([[[5, 7], [11, 13]], [[1, 2], [3, 4]]], dtype=torch.int32)
    assert ops.engram.make_offsets(sizes).tolist() == [[0, 5, 12, 23], [0, 1, 3, 6]]
    given = inputs(4001)
    out = ops.engram.engram_hash(*given).view(2, 4001, 2, 8)
    first = given[3].view(2, 1, 2, 8)
    assert bool(((out >= first) & (out < first + given[2][:, None])).all())


def test_no_tokens() -> None:
    before = native().launch_count()
    assert ops.engram.engram_hash(*inputs(0)).shape == (2, 0, 16)
    assert native().launch_count() == before


@pytest.mark.parametrize(
    "call",
    [
        lambda e, i, m, s, o: e.engram_hash(i.long(), m, s, o),
        lambda e, i, m, s, o: e.engram_hash(i, m.int(), s, o),
        lambda e, i, m, s, o: e.engram_hash(i, m[:, :2], s, o),
        lambda e, i, m, s, o: e.engram_hash(i, m, s[:, :1], o),
        lambda e, i, m, s, o: e.engram_hash(i, m, s, o[:, :8]),
        lambda e, i, m, s, o: e.engram_hash(i, m, s, o, torch.zeros(3, dtype=torch.bool, device="cuda")),
        lambda e, i, m, s, o: e.engram_hash(i.cpu(), m.cpu(), s.cpu(), o.cpu()),
    ],
)
def test_refusals_launch_nothing(call: Any) -> None:
    given = inputs(7)
    before = native().launch_count()
    with pytest.raises((ArgumentError, NoVariantError)):
        call(ops.engram, *given)
    assert native().launch_count() == before


def test_opcheck() -> None:
    opcheck(torch.ops.tkbuild.engram_hash, (*inputs(5), torch.zeros(5, dtype=torch.bool, device="cuda")))

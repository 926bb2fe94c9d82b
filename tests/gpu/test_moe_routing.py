"""Routing on a GPU, through the public functions."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from gpu_checks import opcheck, same

from tkbuild import ops
from tkbuild.errors import ArgumentError, LaunchError, NoVariantError
from tkbuild.ops import config, v1
from tkbuild.reference import moe as reference
from tkbuild.runtime.launcher import native

pytestmark = pytest.mark.gpu

#: (experts of a rank, expert-parallel ranks, k): what the catalogue's tests use.
GRID = [(9, 8, 2), (32, 8, 6), (4, 64, 8), (1, 72, 9), (256, 1, 8), (1, 1, 1)]


def routed(tokens: int, k: int, num_experts: int) -> torch.Tensor:
    """Distinct ids in each row, as gates give them, a quarter of them -1."""
    picked = torch.rand(tokens, max(num_experts, k), device="cuda").argsort(dim=1)[:, :k]
    return torch.where((picked < num_experts) & (torch.rand(tokens, k, device="cuda") > 0.25), picked, -1)


@pytest.fixture(params=[0, 1, 19])
def sms(request: pytest.FixtureRequest):
    """0: all SMs."""
    config.set_num_sms(request.param)
    yield request.param
    config.reset_runtime_config()


# ---- numbering, counts, repeats


@pytest.mark.parametrize("num_tp_ranks", [2, 4, 8])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_mask_indices_by_tp(num_tp_ranks: int, dtype: torch.dtype) -> None:
    indices = routed(4001, 8, 256).to(dtype)
    kept = [ops.moe.mask_indices_by_tp(indices, 256, 8, rank, num_tp_ranks) for rank in range(num_tp_ranks)]
    for rank, masked in enumerate(kept):
        wanted = reference.mask_indices_by_tp(indices, experts_per_rank=32, tp_rank=rank, num_tp_ranks=num_tp_ranks)
        assert same(masked, wanted)
    assert torch.equal((torch.stack(kept) >= 0).sum(dim=0), (indices >= 0).long())


@pytest.mark.parametrize(("num_groups", "_ranks", "k"), GRID)
@pytest.mark.parametrize("tokens", [1, 127, 1500, 30011])
@pytest.mark.usefixtures("sms")
def test_counts(num_groups: int, _ranks: int, k: int, tokens: int) -> None:
    ids = routed(tokens, k, num_groups)
    assert same(ops.moe.group_count(ids, num_groups), reference.group_count(ids, num_groups=num_groups))
    for num_aux_topk in (1, k):
        wanted = reference.aux_fi(ids, num_experts=num_groups, num_aux_topk=num_aux_topk)
        assert same(ops.moe.aux_fi(ids, num_groups, num_aux_topk), wanted)


def test_ids_that_name_no_group_are_not_counted() -> None:
    ids = torch.randint(-50, 50, (5000, 8), device="cuda")
    ids[7, 3], ids[8, 2] = 2**62, -(2**63)
    assert int(ops.moe.group_count(ids, 10).sum()) == int(((ids >= 0) & (ids < 10)).sum())


def test_counts_of_no_rows_are_zero() -> None:
    empty = torch.empty((0, 8), dtype=torch.int64, device="cuda")
    assert ops.moe.group_count(empty, 5).tolist() == [0] * 5
    assert ops.moe.aux_fi(empty, 5, 8).tolist() == [0.0] * 5


@pytest.mark.parametrize("k", [1, 2, 6, 8, 9, 16, 31, 32])
@pytest.mark.parametrize("num_groups", [8, 16, 72])
def test_unique_ids(k: int, num_groups: int) -> None:
    ids = torch.randint(-2, num_groups, (4001, k), device="cuda")
    wanted = reference.inplace_unique_group_indices(ids)
    assert v1.moe.inplace_unique_group_indices(ids, num_groups) is None
    assert torch.equal(ids, wanted)


# ---- the mapping


def check_mapping(topk_idx: torch.Tensor, num_experts: int, alignment: int, num_rows: int, found: tuple) -> None:
    row_maps = torch.empty((3, num_rows), dtype=torch.int32, device="cuda")
    pairs = torch.empty(topk_idx.shape, dtype=torch.int32, device="cuda")
    of_rows, of_pairs, segments = reference.get_fused_mapping(
        topk_idx, row_maps, pairs, num_experts=num_experts, alignment=alignment
    )
    assert len(found) == 8
    for ours, theirs in zip(found[:7], (*of_rows, of_pairs, *segments), strict=True):
        assert same(ours, theirs)


@pytest.mark.parametrize(("num_experts", "ranks", "k"), GRID)
@pytest.mark.parametrize("alignment", [1, 64, 128])
@pytest.mark.parametrize("tokens", [1, 900, 4001])
@pytest.mark.usefixtures("sms")
def test_mapping(num_experts: int, ranks: int, k: int, alignment: int, tokens: int) -> None:
    topk_idx = routed(tokens * min(ranks, 4), k, num_experts)
    found = ops.moe.get_fused_mapping(topk_idx, num_experts, 0, alignment)
    counts = found[7]
    assert counts == found[6].tolist()
    assert found[0].shape == (sum(counts),)
    check_mapping(topk_idx, num_experts, alignment, sum(counts), found)
    num_rows = sum(counts) + 1000
    fixed = ops.moe.get_fused_mapping(topk_idx, num_experts, num_rows, alignment)
    assert fixed[7] == []
    check_mapping(topk_idx, num_experts, alignment, num_rows, fixed)


def test_mapping_without_waiting() -> None:
    topk_idx = routed(100, 6, 32)
    found = ops.moe.get_fused_mapping(topk_idx, 32, 0, 128, force_no_sync=True)
    assert (found[0].shape, found[7]) == ((0,), [])
    assert (found[3] == -1).all()
    assert int(found[6].sum()) % 128 == 0


def test_mapping_in_a_graph() -> None:
    topk_idx = routed(3000, 8, 64)
    ops.moe.get_fused_mapping(topk_idx, 64, 32768, 128)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = ops.moe.get_fused_mapping(topk_idx, 64, 32768, 128)
    topk_idx.copy_(routed(3000, 8, 64))
    graph.replay()
    check_mapping(topk_idx, 64, 128, 32768, found)


def test_mapping_of_no_tokens() -> None:
    empty = torch.empty((0, 8), dtype=torch.int64, device="cuda")
    found = ops.moe.get_fused_mapping(empty, 5, 0, 128)
    assert (found[0].shape, found[3].shape, found[7]) == ((0,), (0, 8), [0] * 5)
    assert ops.moe.get_fused_mapping(empty, 5, 10, 128)[1].tolist() == [-1] * 10


def test_mapping_with_programmatic_launches() -> None:
    """Both launches of a call, and those of the next one on other ids, must wait for what they read and overwrite."""
    ids = [routed(8192, 8, 256) for _ in range(4)]
    config.set_pdl(True)
    try:
        found = [ops.moe.get_fused_mapping(topk_idx, 256, 98304, 128) for topk_idx in ids * 8]
    finally:
        config.reset_runtime_config()
    for topk_idx, maps in zip(ids * 8, found, strict=True):
        check_mapping(topk_idx, 256, 128, 98304, maps)


# ---- contract

IDS = (64, 8)


@pytest.mark.parametrize(
    "call",
    [
        lambda x: ops.moe.group_count(x, 0),
        lambda x: ops.moe.group_count(x, 4097),
        lambda x: ops.moe.group_count(x.int(), 8),
        lambda x: ops.moe.group_count(x.T, 8),
        lambda x: ops.moe.group_count(x[:, :4], 8),
        lambda x: ops.moe.group_count(x[0], 8),
        lambda x: ops.moe.group_count(x.cpu(), 8),
        lambda x: ops.moe.aux_fi(x, 8, 0),
        lambda x: ops.moe.aux_fi(x.float(), 8, 1),
        lambda x: ops.moe.inplace_unique_group_indices(x, 129),
        lambda x: ops.moe.inplace_unique_group_indices(x[:, ::2], 8),
        lambda x: ops.moe.inplace_unique_group_indices(x.view(8, 64), 8),
        lambda x: ops.moe.mask_indices_by_tp(x, 8, 16, 0, 2),
        lambda x: ops.moe.mask_indices_by_tp(x, 64, 8, 2, 2),
        lambda x: ops.moe.mask_indices_by_tp(x.short(), 64, 8, 0, 2),
        lambda x: ops.moe.get_fused_mapping(x, 1025, 0, 128),
        lambda x: ops.moe.get_fused_mapping(x, 0, 0, 128),
        lambda x: ops.moe.get_fused_mapping(x, 8, 0, 0),
        lambda x: ops.moe.get_fused_mapping(x, 8, -1, 128),
        lambda x: ops.moe.get_fused_mapping(x, 1024, 64, 2**22),
        lambda x: ops.moe.get_fused_mapping(x.int(), 8, 512, 1),
        lambda x: ops.moe.get_fused_mapping(x[:, :6], 8, 512, 1),
        lambda x: ops.moe.get_fused_mapping(x.flatten(), 8, 512, 1),
    ],
)
def test_what_the_contract_excludes_is_refused(call: Callable[[torch.Tensor], object]) -> None:
    x = torch.randint(0, 8, IDS, device="cuda")
    before = native().launch_count()
    with pytest.raises((ArgumentError, LaunchError, NoVariantError)):
        call(x)
    assert native().launch_count() == before


def test_no_rows_launch_nothing_where_there_is_nothing_to_write() -> None:
    empty = torch.empty((0, 8), dtype=torch.int64, device="cuda")
    before = native().launch_count()
    assert ops.moe.mask_indices_by_tp(empty, 64, 8, 0, 2).shape == (0, 8)
    ops.moe.inplace_unique_group_indices(empty, 8)
    assert native().launch_count() == before


def test_opcheck() -> None:
    x = torch.randint(-1, 8, IDS, device="cuda")
    ints = {"dtype": torch.int32, "device": "cuda"}
    given = torch.ops.tkbuild
    opcheck(given.mask_indices_by_tp, (x,), {"experts_per_rank": 2, "tp_rank": 0, "num_tp_ranks": 2})
    opcheck(given.group_count, (x, torch.zeros(2, 8, **ints)), {"num_groups": 8, "num_chunks": 2})
    sizes = {"num_experts": 8, "num_aux_topk": 8, "num_chunks": 2}
    opcheck(given.aux_fi, (x, torch.zeros(2, 8, **ints)), sizes)
    opcheck(given.inplace_unique_group_indices, (x.clone(),))
    maps = (torch.zeros(3, 600, **ints), torch.zeros(*IDS, **ints), torch.zeros(2, 8, **ints))
    opcheck(given.get_fused_mapping, (x, *maps), {"num_experts": 8, "alignment": 1, "num_chunks": 2})

"""Routing: numbering of experts, counts, and the map between (token, slot) pairs and rows sorted by expert."""

from __future__ import annotations

import torch

from tkbuild.errors import ArgumentError
from tkbuild.runtime import get_num_sms
from tkbuild.runtime.op import kernel_op, new_empty

_mask_indices_by_tp = kernel_op("moe.mask_indices_by_tp")
_group_count = kernel_op("moe.group_count")
_aux_fi = kernel_op("moe.aux_fi")
_inplace_unique_group_indices = kernel_op("moe.inplace_unique_group_indices")
_get_fused_mapping = kernel_op("moe.get_fused_mapping")

_MAX_EXPERTS = 1024
_MAX_GROUPS = 4096
_MAX_ROWS = 2**31 - 33  # a warp looks at 32 rows at once

#: Up to how many ids one CTA counts alone, and how many more CTAs get each.
_COUNT_ALONE_IDS, _COUNT_CHUNK_IDS = 8192, 2048
#: Up to how many ids one launch maps, and how two launches deal out more.
_MAP_ONE_LAUNCH_IDS, _MAP_CHUNK_IDS, _MAP_MAX_CHUNKS = 8192, 512, 128

FusedMapping = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, list[int]]
"""What ``get_fused_mapping`` returns."""


def mask_indices_by_tp(indices: torch.Tensor, n: int, num_ep_ranks: int, tp_rank: int, num_tp_ranks: int) -> torch.Tensor:
    """Return ``indices`` as ``tp_rank`` numbers its own experts, -1 for experts of other ranks and for negative ids.

    n // num_ep_ranks experts form a block. Blocks are dealt out in turn to the ``num_tp_ranks`` tensor-parallel ranks, each of
    which counts the ids of its own blocks one behind the other. Ids of n or more follow the same rule.

    Shapes: indices (T, k) -> the same; T may be 0.  Dtypes: int32 or int64, kept.  Layout: contiguous.
    Raises: ArgumentError, NoVariantError, LaunchError.
    """
    name = "moe.mask_indices_by_tp"
    _require(num_ep_ranks >= 1 and n >= num_ep_ranks, name, f"n is {n} for {num_ep_ranks} ranks", "an expert for each rank")
    _require(0 <= tp_rank < num_tp_ranks, name, f"tp_rank is {tp_rank}", f"0 to {num_tp_ranks - 1}")
    result: torch.Tensor = _mask_indices_by_tp((indices,), (), (n // num_ep_ranks, tp_rank, num_tp_ranks))
    return result


def group_count(group_idx: torch.Tensor, num_groups: int) -> torch.Tensor:
    """Return how often each number below ``num_groups`` occurs; other numbers, -1 among them, are not counted.

    Shapes: group_idx (T, k), num_groups 1 to 4096 -> (num_groups); T may be 0.  Dtypes: int64 -> int32.
    Layout: contiguous.  Raises: ArgumentError, NoVariantError, LaunchError.
    """
    _require(1 <= num_groups <= _MAX_GROUPS, "moe.group_count", f"num_groups is {num_groups}", f"1 to {_MAX_GROUPS}")
    chunks = _count_chunks(group_idx)
    partial = new_empty(group_idx, (chunks, num_groups), torch.int32)
    result: torch.Tensor = _group_count((group_idx, partial), (), (num_groups, chunks))
    return result


def aux_fi(topk_idx: torch.Tensor, num_experts: int, num_aux_topk: int) -> torch.Tensor:
    """Return count * num_experts / (T * num_aux_topk) of each expert, for the auxiliary loss that balances them.

    Both products are exact and rounded to float32, then divided once: the result depends on the ids alone. Ids
    that name no expert are not counted.

    Shapes: topk_idx (T, k), num_experts 1 to 4096 -> (num_experts); zeros if T is 0.  Dtypes: int64 -> float32.
    Layout: contiguous.  Raises: ArgumentError, NoVariantError, LaunchError.
    """
    name = "moe.aux_fi"
    _require(1 <= num_experts <= _MAX_GROUPS, name, f"num_experts is {num_experts}", f"1 to {_MAX_GROUPS}")
    _require(num_aux_topk >= 1, name, f"num_aux_topk is {num_aux_topk}", "at least 1")
    chunks = _count_chunks(topk_idx)
    partial = new_empty(topk_idx, (chunks, num_experts), torch.int32)
    result: torch.Tensor = _aux_fi((topk_idx, partial), (), (num_experts, num_aux_topk, chunks))
    return result


def inplace_unique_group_indices(group_indices: torch.Tensor, num_groups: int) -> None:
    """Replace each id that stands further left in its row too by -1, in place; negative ids stay as they are.

    ``num_groups`` is what callers expect as the end of the ids, at most 128; ids from there on are treated like all others.
    Shapes: (T, k), k 1 to 32; T may be 0.  Dtypes: int64.  Layout: contiguous.
    Raises: ArgumentError, NoVariantError, LaunchError.
    """
    _require(1 <= num_groups <= 128, "moe.inplace_unique_group_indices", f"num_groups is {num_groups}", "1 to 128")
    _inplace_unique_group_indices((group_indices,))


def get_fused_mapping(
    topk_idx: torch.Tensor, num_experts: int, num_expanded_tokens: int, alignment: int, force_no_sync: bool = False
) -> FusedMapping:
    """Sort the (token, slot) pairs by expert into padded segments of rows.

    Returns (pos_to_expert, pos_to_token, pos_to_token_topk, token_topk_to_pos, expert_start, expert_end, num_tokens_per_expert,
    the last as a list). Expert e owns the rows expert_start[e] to expert_end[e], a multiple of ``alignment``, which is
    num_tokens_per_expert[e]: first its pairs, in increasing order of token * k + slot, then padding. A row's expert,
    token and token * k + slot stand in the maps of rows, -1 for padding; a pair's row in token_topk_to_pos, -1 where the id
    names no expert. The result depends on the arguments alone.

    num_expanded_tokens: N, rows of the maps; those behind the last segment are -1, and pairs whose row would lie behind N
    are left out (-1). With 0 this waits for the stream, gives the maps as many rows as the segments have, and fills
    the list; else the list is empty. ``force_no_sync``: 0 means no rows.

    Shapes: topk_idx (T, k) -> maps of rows (N), of pairs (T, k), segments (num_experts), num_experts 1 to 1024; T may be 0.
    T * k + num_experts * (alignment - 1) must be below 2**31.
    Dtypes: int64 -> int32.  Layout: contiguous.  Raises: ArgumentError, NoVariantError, LaunchError.
    """
    name = "moe.get_fused_mapping"
    _require(1 <= num_experts <= _MAX_EXPERTS, name, f"num_experts is {num_experts}", f"1 to {_MAX_EXPERTS}")
    _require(alignment >= 1, name, f"alignment is {alignment}", "at least 1")
    _require(num_expanded_tokens >= 0, name, f"num_expanded_tokens is {num_expanded_tokens}", "at least 0")
    _require(topk_idx.dim() == 2, name, f"topk_idx has {topk_idx.dim()} dimensions", "2: (T, k)")
    sync = num_expanded_tokens == 0 and not force_no_sync
    most = (topk_idx.numel() + (alignment - 1) * num_experts) // alignment * alignment
    _require(most <= _MAX_ROWS, name, f"there may be {most} rows", f"at most {_MAX_ROWS}: positions are int32")
    chunks = _map_chunks(topk_idx)
    num_rows = most if sync else num_expanded_tokens
    row_maps = new_empty(topk_idx, (3, num_rows), torch.int32, (_aligned(num_rows), 1))
    pairs = new_empty(topk_idx, topk_idx.shape, torch.int32)
    counts = new_empty(topk_idx, (chunks, _aligned(num_experts)), torch.int32) if chunks else None
    segments = _get_fused_mapping((topk_idx, row_maps, pairs, counts), (), (num_experts, alignment, chunks))
    start, end, rows = segments.unbind()
    per_expert: list[int] = rows.tolist() if sync else []
    expert, token, slot = (row_maps[:, : sum(per_expert)] if sync else row_maps).unbind()
    return expert, token, slot, pairs, start, end, rows, per_expert


def _aligned(elems: int) -> int:
    """``elems`` rounded up, so that int32 rows of so many start at multiples of 16 bytes."""
    return (elems + 3) & ~3


def _count_chunks(ids: torch.Tensor) -> int:
    if ids.numel() <= _COUNT_ALONE_IDS:
        return 1
    return min(-(-ids.numel() // _COUNT_CHUNK_IDS), _sms_of(ids))


def _map_chunks(ids: torch.Tensor) -> int:
    """CTAs that count a chunk of the ids each, or 0 if each counts all."""
    if ids.numel() <= _MAP_ONE_LAUNCH_IDS:
        return 0
    return min(-(-ids.numel() // _MAP_CHUNK_IDS), _MAP_MAX_CHUNKS, _sms_of(ids))


def _sms_of(tensor: torch.Tensor) -> int:
    return get_num_sms(tensor.get_device()) if tensor.is_cuda else 1


def _require(right: bool, name: str, found: str, expected: str) -> None:
    if not right:
        raise ArgumentError(f"{name}: {found}, expected {expected}", kernel=name)

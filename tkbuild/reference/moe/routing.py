"""References of routing: numbering of experts, counts, and the map between (token, slot) pairs and rows sorted by expert."""

from __future__ import annotations

import torch

_CHUNK_IDS = 1 << 28


def mask_indices_by_tp(indices: torch.Tensor, *, experts_per_rank: int, tp_rank: int, num_tp_ranks: int) -> torch.Tensor:
    """Return ``indices`` as ``tp_rank`` numbers its own experts, -1 for experts of other ranks and for negative ids.

    Blocks of ``experts_per_rank`` ids are dealt out in turn to ``num_tp_ranks`` ranks; a rank counts the ids of its own
    blocks one behind the other.
    Shapes: any; the dtype, an integer, is kept.
    """
    ids = indices.long()
    block = ids // experts_per_rank
    ours = (ids >= 0) & (block % num_tp_ranks == tp_rank)
    local = block // num_tp_ranks * experts_per_rank + ids % experts_per_rank
    return torch.where(ours, local, -1).to(indices.dtype)


def group_count(
    group_idx: torch.Tensor, partial: torch.Tensor | None = None, *, num_groups: int, num_chunks: int = 1
) -> torch.Tensor:
    """Return how often each number below ``num_groups`` occurs in ``group_idx``; other numbers are not counted.

    Shapes: group_idx any, int64 -> (num_groups), int32. ``partial`` and ``num_chunks`` are how the kernel shares out the work.
    """
    counts = torch.zeros(num_groups, dtype=torch.int64, device=group_idx.device)
    for ids in group_idx.flatten().split(_CHUNK_IDS):
        counts += torch.bincount(ids[(ids >= 0) & (ids < num_groups)], minlength=num_groups)
    return counts.int()


def aux_fi(
    topk_idx: torch.Tensor, partial: torch.Tensor | None = None, *, num_experts: int, num_aux_topk: int, num_chunks: int = 1
) -> torch.Tensor:
    """Return count * num_experts / (T * num_aux_topk) of each expert: two exact products rounded to float32, one division.

    Shapes: topk_idx (T, k), int64 -> (num_experts), float32; zeros if T is 0.
    """
    counts = group_count(topk_idx, num_groups=num_experts)
    if topk_idx.shape[0] == 0:
        return torch.zeros_like(counts, dtype=torch.float32)
    divisor = torch.tensor(topk_idx.shape[0] * num_aux_topk, device=counts.device).float()
    return (counts.long() * num_experts).float() / divisor


def inplace_unique_group_indices(group_indices: torch.Tensor) -> torch.Tensor:
    """Return ``group_indices`` with -1 for each id that stands further left in its row too; negative ids stay as they are.

    Shapes: (T, k), int64. In spite of its name this changes nothing in place.
    """
    result = group_indices.clone()
    for slot in range(1, group_indices.shape[1]):
        ids = group_indices[:, slot]
        repeated = (group_indices[:, :slot] == ids[:, None]).any(dim=1)
        result[:, slot] = torch.where(repeated & (ids >= 0), -1, ids)
    return result


def get_fused_mapping(
    topk_idx: torch.Tensor,
    row_maps: torch.Tensor,
    token_topk_to_pos: torch.Tensor,
    counts: torch.Tensor | None = None,
    *,
    num_experts: int,
    alignment: int,
    num_chunks: int = 0,
) -> tuple[torch.Tensor, ...]:
    """Return (row_maps, token_topk_to_pos, segments).

    Expert e owns rows segments[0, e] to segments[1, e], which are segments[2, e], a multiple of ``alignment``: first the pairs
    whose id is e, in increasing order of their flat index token * k + slot, then padding. row_maps: expert, token and flat index
    of each row's pair; -1 for padding and rows behind the last segment. token_topk_to_pos: row of each pair; -1 for pairs with
    another id, and those whose row would be N or more.

    Shapes: topk_idx (T, k), int64; row_maps (3, N), token_topk_to_pos (T, k), segments (3, num_experts), all int32. Of the
    maps that are given only the shapes count.
    """
    ids, num_rows = topk_idx.flatten(), row_maps.shape[1]
    experts = torch.where((ids >= 0) & (ids < num_experts), ids, num_experts).int()
    per_expert = torch.bincount(experts, minlength=num_experts + 1)[:num_experts]
    rows = (per_expert + alignment - 1) // alignment * alignment
    end = rows.cumsum(0)
    start = end - rows

    pairs = experts.sort(stable=True).indices[: int(per_expert.sum())]
    expert = experts[pairs].long()
    rank = torch.arange(pairs.numel(), device=ids.device) - (per_expert.cumsum(0) - per_expert)[expert]
    row = start[expert] + rank
    fits = row < num_rows
    row, pairs, expert = row[fits], pairs[fits], expert[fits]

    of_row, of_pair = torch.full_like(row_maps, -1), torch.full_like(token_topk_to_pos, -1)
    of_row[:, row] = torch.stack([expert, pairs // max(topk_idx.shape[1], 1), pairs]).int()
    of_pair.view(-1)[pairs] = row.int()
    return of_row, of_pair, torch.stack([start, end, rows]).int()

"""References of the packing of weight scales."""

from __future__ import annotations

import torch

from tkbuild.reference.quant.rules import pack_ue8m0


def weight_sf(sf: torch.Tensor, block: int) -> torch.Tensor:
    """Return the packed exponents of the scales of a weight, word by word, each for every row of the weight.

    Byte q of word [g, w, r] is the exponent field of sf[g, r // block, 4 w + q], 0 behind the last; signs and mantissas do not
    count. Shapes: sf (G, R, C) float32 -> (G, ceil(C / 4), R * block) int32, contiguous.
    """
    fields = (sf.view(torch.int32) >> 23) & 0xFF
    words = torch.stack([pack_ue8m0(group) for group in fields]) if len(fields) else fields
    return words.repeat_interleave(block, dim=1).transpose(1, 2).contiguous()


def batched_transpose_weight_sf(
    sf: torch.Tensor,
    first_tile: torch.Tensor,
    source: torch.Tensor,
    block_rows: torch.Tensor,
    block_cols: torch.Tensor,
    groups: torch.Tensor,
    plain: torch.Tensor,
    transposed: torch.Tensor,
    *,
    block: int,
    words: int,
    tiles: int,
) -> torch.Tensor:
    """Return a pool (words,) int32 with ``weight_sf`` of each weight at ``plain`` and of its transpose at ``transposed``.

    A weight has groups x block_rows x block_cols scales, which begin at element ``source`` of sf; first_tile and tiles say how
    the kernel shares out its work.
    """
    assert tiles > 0 and len(first_tile) == len(source)
    pool = torch.empty(words, dtype=torch.int32, device=sf.device)
    columns = (source, block_rows, block_cols, groups, plain, transposed)
    for start, rows, cols, count, plain_at, transposed_at in zip(*(column.tolist() for column in columns), strict=True):
        scales = sf[start : start + count * rows * cols].view(count, rows, cols)
        for at, of in ((plain_at, scales), (transposed_at, scales.transpose(1, 2).contiguous())):
            packed = weight_sf(of, block)
            pool[at : at + packed.numel()] = packed.flatten()
    return pool

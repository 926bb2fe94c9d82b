"""References of the expansion of tokens to one row for each expert they go to, and of the weighted sum that undoes it."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from tkbuild.reference.arithmetic import fma
from tkbuild.reference.quant.rules import canonical_nan, round_to_e4m3

_CHUNK_ELEMENTS = 1 << 24


def expand_to_fused(
    x: torch.Tensor,
    token_topk_to_pos: torch.Tensor,
    pos_to_expert: torch.Tensor,
    x_sf: torch.Tensor | None,
    out: torch.Tensor,
    out_sf: torch.Tensor | None,
    slot_of_row: torch.Tensor | None = None,
    *,
    num_links: int = 0,
) -> torch.Tensor | tuple[torch.Tensor, ...]:
    """Return copies of ``out``, and of ``out_sf`` if given, with the rows of ``x`` and ``x_sf`` where slots name them.

    Row token_topk_to_pos[t, j] gets row t of the source, unless it is outside [0, N). Rows with a negative pos_to_expert
    become 0. Others keep what they hold. No two slots may name one row, nor a slot a row of padding.

    Shapes: x (T, H), token_topk_to_pos (T, k), pos_to_expert (N), x_sf (T, S), out (N, H), out_sf (N, S). Dtypes: any; the
    maps int32. ``slot_of_row`` and ``num_links`` say how a kernel goes about it.
    """
    token, row = _named(token_topk_to_pos, pos_to_expert.shape[0])
    padding = pos_to_expert < 0
    expanded = _expand(x, out, token, row, padding)
    return expanded if x_sf is None or out_sf is None else (expanded, _expand(x_sf, out_sf, token, row, padding))


def _expand(x: torch.Tensor, out: torch.Tensor, token: torch.Tensor, row: torch.Tensor, padding: torch.Tensor) -> torch.Tensor:
    result = out.clone()
    result[padding] = 0
    result[row] = x[token]
    return result


def _named(token_topk_to_pos: torch.Tensor, num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the tokens of the slots that name a row, and those rows."""
    valid = (token_topk_to_pos >= 0) & (token_topk_to_pos < num_rows)
    return valid.nonzero()[:, 0], token_topk_to_pos[valid].long()


def reduce_fused(
    x: torch.Tensor,
    x_sf: torch.Tensor | None,
    topk_weights: torch.Tensor | None,
    token_topk_to_pos: torch.Tensor,
    sf: torch.Tensor | None,
    *,
    out_dtype: str,
) -> torch.Tensor:
    """Return the weighted sum of the rows of ``x`` that the slots of each token name.

    From 0 on, slot by slot: sum = fma(x[row], s, sum) in float32, where s = topk_weights[t, j] * x_sf[row], with 1 for what is
    not given. Slots whose row is outside [0, N) are left out. The sum times ``sf``, if given, is rounded to ``out_dtype`` once;
    e4m3 saturates. NaN results have the bits that the GPU's arithmetic gives them.

    Shapes: x (N, H), x_sf (N), topk_weights and token_topk_to_pos (T, k), sf (1) -> (T, H). Dtypes: x bfloat16 or float32,
    out_dtype the same or 'float8_e4m3fn'; token_topk_to_pos int32; the others float32.
    """
    result = torch.empty((token_topk_to_pos.shape[0], x.shape[1]), dtype=getattr(torch, out_dtype), device=x.device)
    for tokens in _chunks(*result.shape):
        weights = None if topk_weights is None else topk_weights[tokens]
        sums = _sums(x, x_sf, weights, token_topk_to_pos[tokens])
        sums = sums if sf is None else sums * sf
        result[tokens] = round_to_e4m3(sums) if result.dtype == torch.float8_e4m3fn else canonical_nan(sums.to(result.dtype))
    return result


def _chunks(rows: int, columns: int) -> Iterator[slice]:
    step = max(1, _CHUNK_ELEMENTS // max(columns, 1))
    for first in range(0, rows, step):
        yield slice(first, first + step)


def _sums(
    x: torch.Tensor, x_sf: torch.Tensor | None, topk_weights: torch.Tensor | None, token_topk_to_pos: torch.Tensor
) -> torch.Tensor:
    sums = torch.zeros((token_topk_to_pos.shape[0], x.shape[1]), device=x.device)
    valid = (token_topk_to_pos >= 0) & (token_topk_to_pos < x.shape[0])
    for slot in range(token_topk_to_pos.shape[1]):
        tokens = valid[:, slot].nonzero()[:, 0]
        rows = token_topk_to_pos[tokens, slot].long()
        factor = torch.ones(tokens.shape, device=x.device) if topk_weights is None else topk_weights[tokens, slot]
        factor = factor if x_sf is None else factor * x_sf[rows]
        sums[tokens] = fma(x[rows].float(), factor[:, None], sums[tokens])
    return sums

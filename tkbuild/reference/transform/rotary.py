"""Reference of the rotary position embedding."""

from __future__ import annotations

import torch

from tkbuild.reference.arithmetic import fma


def apply_rotary(
    x: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    positions: torch.Tensor | None,
    *,
    interleaved: int,
    conjugate: int,
    seqlen_offset: int,
) -> torch.Tensor:
    """Return x with every pair of a token's elements rotated by the angles in the token's row of the cache.

    The row is seqlen_offset + the token's position, which is its index in the sequence unless given; rows before the first
    and behind the last count as those. A pair is two neighbours with ``interleaved``, else the elements i and i + d / 2. For a pair
    (f, s): f' = fma(f, cos, -(s * sin)), s' = fma(f, sin, s * cos); ``conjugate`` negates the angle.

    Shapes: x (B, S, heads, d); cos_sin_cache (rows, d), cosines before sines; positions (B, S).
    Dtypes: x bfloat16 or float32 with a float32 cache, or all float64; positions int32 or int64.
    """
    rows = torch.arange(x.shape[1], device=x.device)[None].expand(x.shape[:2]) if positions is None else positions.long()
    rows = (rows + seqlen_offset).clamp(0, cos_sin_cache.shape[0] - 1)
    cos, sin = cos_sin_cache[rows][:, :, None].chunk(2, dim=-1)
    sin = -sin if conjugate else sin
    wide = x if x.dtype == torch.float64 else x.float()
    first, second = (wide[..., 0::2], wide[..., 1::2]) if interleaved else wide.chunk(2, dim=-1)
    pairs = _fma(first, cos, -(second * sin)), _fma(first, sin, second * cos)
    result = torch.stack(pairs, dim=-1).flatten(-2) if interleaved else torch.cat(pairs, dim=-1)
    return result.to(x.dtype)


def _fma(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    return a * b + c if a.dtype == torch.float64 else fma(a, b, c)

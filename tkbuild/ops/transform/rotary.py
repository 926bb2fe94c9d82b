"""The rotary position embedding."""

from __future__ import annotations

import torch

from tkbuild.errors import ArgumentError
from tkbuild.runtime.op import kernel_op

__all__ = ["apply_rotary"]

_apply_rotary = kernel_op("transform.apply_rotary")
_KERNEL = "transform.apply_rotary"


def apply_rotary(
    query: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    key: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
    interleaved: bool = False,
    conjugate: bool = False,
    seqlen_offset: int = 0,
) -> None:
    """Rotate every pair of elements of ``query``, and of ``key`` if given, in place by the angles of the token's position.

    The row of the cache is seqlen_offset + positions[token], or + the token's index in its sequence. A pair (f, s) is two neighbours
    with ``interleaved``, else the elements i and i + d / 2: f' = f * cos - s * sin, s' = f * sin + s * cos, in float32, rounded once;
    ``conjugate`` is the inverse rotation. Positions are not checked: a row beside the cache counts as its nearest one.

    Shapes: query (T, heads, d) or (B, S, heads, d), d = 64 or 128; key likewise, with heads of its own; cos_sin_cache (rows, d),
    cosines before sines; positions (T) or (B, S).  Dtypes: query and key bfloat16 or float32, alike; cache float32; positions int32 or
    int64, of which the low 32 bits count.  Layout: last strides 1, the others of query and key multiples of 8 elements, that of the
    cache of 4; data aligned to 16 bytes: part of a head can be rotated as a slice.
    Raises: ArgumentError, NoVariantError, LaunchError.
    """
    tensors = [_batched(query, "query")]
    if key is not None:
        tensors.append(_batched(key, "key"))
        if key.dtype != query.dtype or (*key.shape[:-2], key.shape[-1]) != (*query.shape[:-2], query.shape[-1]):
            expected = f"{query.dtype} and, but for the heads, the shape of query, {tuple(query.shape)}"
            raise _wrong(f"key is {key.dtype} {tuple(key.shape)}", expected)
        if not _is_readable(tensors[1], query.device):
            tensors.reverse()  # the launcher refuses it before query is rotated
    rows = None if positions is None else _low_words(positions, query)
    if rows is None and not 0 <= seqlen_offset <= cos_sin_cache.shape[0] - tensors[0].shape[1]:
        raise _wrong(
            f"seqlen_offset is {seqlen_offset} for {tensors[0].shape[1]} tokens",
            f"rows of the cache, which has {cos_sin_cache.shape[0]}",
        )
    for tensor in tensors:
        _apply_rotary((tensor, cos_sin_cache, rows), (), (int(interleaved), int(conjugate), seqlen_offset))


def _batched(x: torch.Tensor, name: str) -> torch.Tensor:
    if x.dim() not in (3, 4):
        raise _wrong(f"{name} has {x.dim()} dimensions", "(T, heads, d) or (B, S, heads, d)")
    return x if x.dim() == 4 else x[None]


def _is_readable(x: torch.Tensor, device: torch.device) -> bool:
    *strides, last = x.stride()
    if x.device != device or last != 1 or any(stride % 8 for stride in strides):
        return False
    return torch.compiler.is_compiling() or x.data_ptr() % 16 == 0


def _low_words(positions: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    """The positions as int32 (B, S), without a copy where their layout allows it."""
    if positions.dtype not in (torch.int32, torch.int64) or positions.shape != query.shape[:-2]:
        raise _wrong(f"positions is {positions.dtype} {tuple(positions.shape)}", f"int32 or int64 {tuple(query.shape[:-2])}")
    rows = positions if positions.dim() == 2 else positions[None]
    if positions.dtype == torch.int32:
        return rows
    if rows.stride(1) != 1 or torch.compiler.is_compiling():
        return rows.to(torch.int32)
    return rows.view(torch.int32)[:, ::2]


def _wrong(found: str, expected: str) -> ArgumentError:
    return ArgumentError(f"{_KERNEL}: {found}, expected {expected}", kernel=_KERNEL)

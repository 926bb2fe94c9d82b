"""Expansion of tokens to one row for each expert they go to, and the weighted sum that undoes it."""

from __future__ import annotations

import torch

from tkbuild.errors import ArgumentError
from tkbuild.ops.quant.types import QuantTensor, empty_scales, pair_of
from tkbuild.runtime.op import allocator, dtype_name, kernel_op, new_empty

_expand_to_fused = kernel_op("moe.expand_to_fused")
_reduce_fused = kernel_op("moe.reduce_fused")

_BLOCKS = (32, 128)
_SF_DTYPES = (torch.float32, torch.int32)
_BLOCKS_PER_WORD = 4
#: From how many rows on column-major scales are stored by runs of rows, which takes a launch more, and up to how many slots.
_RUN_MIN_ROWS, _RUN_MAX_SLOTS = 4096, 2**31 - 1


def expand_to_fused(x: torch.Tensor, token_topk_to_pos: torch.Tensor, pos_to_expert: torch.Tensor) -> torch.Tensor:
    """Return one row for each position: the row of the token that a slot puts there, zeros for padding.

    Row token_topk_to_pos[t, j] is row t of x; a slot whose number is no row, such as -1, is left out. Rows with a negative
    pos_to_expert are 0. Rows that are neither are uninitialised. No two slots may name one row, nor a slot a row of padding:
    such rows get the bytes of any of them. Elements are copied as they are, NaN included.

    Shapes: x (T, H), token_topk_to_pos (T, k), k up to 32, pos_to_expert (N) -> (N, H); T, H and N may be 0.
    Dtypes: x any, kept; maps int32.  Layout: rows of x contiguous, any distance apart, fastest where that and H are
    multiples of 16 bytes; maps contiguous.
    Raises: ArgumentError, NoVariantError, LaunchError.
    """
    name = "moe.expand_to_fused"
    _check_rows(name, x)
    _check_map(name, token_topk_to_pos, pos_to_expert)
    out = new_empty(x, (pos_to_expert.shape[0], x.shape[1]), x.dtype)
    _expand_to_fused((_bytes(x), token_topk_to_pos, pos_to_expert, None, _bytes(out), None, None), (), (0,))
    return out


def expand_to_fused_with_sf(
    x: QuantTensor,
    num_per_channels: int,
    token_topk_to_pos: torch.Tensor,
    pos_to_expert: torch.Tensor,
    use_tma_aligned_col_major_sf: bool = False,
) -> QuantTensor:
    """``expand_to_fused`` of quantised data, and of its scales in blocks of ``num_per_channels`` columns; returns (data, sf).

    Shapes: x data (T, H), sf (T, ceil(H / b)), packed (T, ceil(H / b / 4)), b 32 or 128 -> data (N, H), sf (N, ..). Data of
    int8 holds two columns of e2m1 in an element; its H may count either.
    Dtypes: data any; sf float32, or int32 of four packed exponents, which needs ``use_tma_aligned_col_major_sf``.
    Layout: sf with any strides; that of the result row-major, or with ``use_tma_aligned_col_major_sf`` strides (1, N rounded up
    to 4). All else as in ``expand_to_fused``.
    """
    name = "moe.expand_to_fused_with_sf"
    data, sf = pair_of(name, x)
    _check_rows(name, data)
    _check_map(name, token_topk_to_pos, pos_to_expert)
    _check_sf(name, data, sf, num_per_channels, use_tma_aligned_col_major_sf)
    rows = pos_to_expert.shape[0]
    empty = allocator(data)
    out = empty((rows, data.shape[1]), data.dtype)
    out_sf = empty_scales(empty, rows, sf.shape[1], sf.dtype, use_tma_aligned_col_major_sf)
    words = (sf.view(torch.int32), out_sf.view(torch.int32))
    by_runs = use_tma_aligned_col_major_sf and rows >= _RUN_MIN_ROWS and token_topk_to_pos.numel() <= _RUN_MAX_SLOTS
    num_links = rows if by_runs else 0
    links = empty((num_links,), torch.int32) if num_links else None
    _expand_to_fused((_bytes(data), token_topk_to_pos, pos_to_expert, words[0], _bytes(out), words[1], links), (), (num_links,))
    return out, out_sf


def reduce_fused(
    x: torch.Tensor | QuantTensor,
    topk_weights: torch.Tensor | None,
    token_topk_to_pos: torch.Tensor,
    fp8_format: str = "",
    sf: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return for each token the weighted sum of the rows that its slots name.

    From 0 on, slot by slot: sum = fma(x[row], s, sum) in float32, where s is topk_weights[t, j], 1 without weights, times the
    row's scale where x is (rows, scales), rounded. A slot whose number is no row, such as -1, is left out: a token without
    slots gives 0. The sum is rounded once, with ``fp8_format`` 'e4m3' after a multiplication by ``sf`` if that is given; e4m3
    saturates, and NaN becomes 0x7F. NaN and infinities spread as the formula says.

    Shapes: x (N, H), H a multiple of 16, scales (N), topk_weights and token_topk_to_pos (T, k), k up to 32, sf (1) -> (T, H);
    T and N may be 0.
    Dtypes: x bfloat16 or float32, the result the same or float8_e4m3fn; token_topk_to_pos int32; the others float32.
    Layout: x any row stride that keeps 16-byte alignment, others contiguous. ``out``: where the result goes, contiguous, at an
    address of 16 bytes.
    Raises: ArgumentError, NoVariantError, LaunchError.
    """
    name = "moe.reduce_fused"
    if fp8_format not in ("", "e4m3"):
        raise ArgumentError(f"{name}: fp8_format is {fp8_format!r}, expected '' or 'e4m3'", kernel=name)
    if sf is not None and not fp8_format:
        raise ArgumentError(f"{name}: sf is given, expected fp8_format='e4m3' with it", kernel=name)
    rows, x_sf = (x, None) if isinstance(x, torch.Tensor) else pair_of(name, x)
    if rows.dtype not in (torch.bfloat16, torch.float32):
        raise ArgumentError(f"{name}: x is {dtype_name(rows.dtype)}, expected bfloat16 or float32", kernel=name)
    if x_sf is not None and (x_sf.shape != rows.shape[:1] or rows.dim() != 2):
        raise ArgumentError(
            f"{name}: the rows have shape {tuple(rows.shape)} and their scales {tuple(x_sf.shape)}, expected (N, H) and (N,)",
            kernel=name,
        )
    out_dtype = "float8_e4m3fn" if fp8_format else dtype_name(rows.dtype)
    tensors = (rows, x_sf, topk_weights, token_topk_to_pos, sf)
    result: torch.Tensor = _reduce_fused(tensors, (out_dtype,), (), None if out is None else (out,))
    return result


def _check_rows(name: str, x: torch.Tensor) -> None:
    if x.dim() != 2 or (x.stride(1) != 1 and x.shape[1] > 1):
        found = f"x has shape {tuple(x.shape)} and strides {tuple(x.stride())}"
        raise ArgumentError(f"{name}: {found}, expected (T, H) with contiguous rows", kernel=name)


def _check_map(name: str, token_topk_to_pos: torch.Tensor, pos_to_expert: torch.Tensor) -> None:
    if pos_to_expert.dim() != 1 or token_topk_to_pos.dim() != 2:
        found = f"shapes {tuple(token_topk_to_pos.shape)} and {tuple(pos_to_expert.shape)}"
        raise ArgumentError(f"{name}: maps of {found}, expected (T, k) and (N)", kernel=name)


def _check_sf(name: str, data: torch.Tensor, sf: torch.Tensor, block: int, col_major: bool) -> None:
    if block not in _BLOCKS:
        raise ArgumentError(f"{name}: num_per_channels is {block}, expected 32 or 128", kernel=name)
    if sf.dtype not in _SF_DTYPES:
        raise ArgumentError(f"{name}: sf is {dtype_name(sf.dtype)}, expected float32 or int32", kernel=name)
    packed = sf.dtype == torch.int32
    if packed and not col_major:
        raise ArgumentError(f"{name}: sf is packed, expected use_tma_aligned_col_major_sf=True with it", kernel=name)
    columns_per_element = (1, 2) if data.dtype == torch.int8 else (1,)
    columns_per_word = block * (_BLOCKS_PER_WORD if packed else 1)
    shapes = [(data.shape[0], -(-data.shape[1] * columns // columns_per_word)) for columns in columns_per_element]
    if tuple(sf.shape) not in shapes:
        raise ArgumentError(f"{name}: sf has shape {tuple(sf.shape)}, expected {' or '.join(map(str, shapes))}", kernel=name)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor``, whose rows are contiguous, as bytes. The stride of a single column, which means nothing, may be any."""
    if tensor.stride(1) != 1:
        tensor = tensor.as_strided(tensor.shape, (tensor.stride(0), 1))
    return tensor.view(torch.uint8)

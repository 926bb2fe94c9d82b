"""The pair that quantised data travels in, and what the functions that take or make it check and allocate alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tkbuild.errors import ArgumentError
from tkbuild.runtime.op import dtype_name, is_traced, view_of

QuantTensor = tuple[torch.Tensor, torch.Tensor]
"""Quantised data with its scale factors."""
LARGEST = {"e4m3": 448.0, "e2m1": 6.0}
"""The greatest value of a format: an abs-max over it is the scale."""
FORMATS_OF_SCALES = (torch.float32, torch.int32, torch.float8_e4m3fn)
"""The dtypes of float32, packed and e4m3 scales, in the order in which kernels that take any of them do."""
_COLUMN_PITCH = 4


def pair_of(function: str, x: Any) -> QuantTensor:
    """Return ``x`` as (data, sf). Raises: ArgumentError unless it is a pair of tensors."""
    if not isinstance(x, (tuple, list)) or len(x) != 2 or not all(isinstance(part, torch.Tensor) for part in x):
        raise ArgumentError(f"{function}: x is a {type(x).__name__}, expected a pair of tensors (data, sf)")
    return x[0], x[1]


def by_format(
    function: str, name: str, sf: torch.Tensor, formats: tuple[torch.dtype, ...] = FORMATS_OF_SCALES
) -> tuple[torch.Tensor | None, ...]:
    """Return ``sf`` at the place of its dtype in ``formats`` and None at the others. Raises: ArgumentError for another dtype."""
    if not isinstance(sf, torch.Tensor) or sf.dtype not in formats:
        known = ", ".join(map(dtype_name, formats))
        found = dtype_name(sf.dtype) if isinstance(sf, torch.Tensor) else type(sf).__name__
        raise ArgumentError(f"{function}: {name} is {found}, expected a tensor of one of {known}", argument=name)
    return tuple([sf if sf.dtype == dtype else None for dtype in formats])


def block_of(function: str, name: str, block: Any) -> tuple[int, int]:
    """Return ``block`` as (rows, columns). Raises: ArgumentError unless it is two numbers, both at least 1."""
    is_pair = isinstance(block, (tuple, list)) and len(block) == 2
    if not is_pair or not all(isinstance(extent, int) and extent >= 1 for extent in block):
        raise ArgumentError(f"{function}: {name} is {block!r}, expected (rows, columns), both at least 1")
    return block[0], block[1]


def check_packed(function: str, round_sf: bool, packed: bool) -> None:
    """Raises: ArgumentError for packed scales that are not rounded."""
    if packed and not round_sf:
        raise ArgumentError(f"{function}: use_packed_ue8m0 needs round_sf=True: packed scales are powers of two", kernel=function)


def empty_scales(empty: Callable[..., torch.Tensor], rows: int, columns: int, dtype: torch.dtype, col_major: bool) -> torch.Tensor:
    """Return uninitialised scales (rows, columns) of 4 bytes that ``empty``, of ``allocator``, makes: row-major, or column by column, each
    a multiple of 16 bytes."""
    if not col_major:
        return empty((rows, columns), dtype)
    size, strides = (rows, columns), (1, -(-rows // _COLUMN_PITCH) * _COLUMN_PITCH)
    if strides[1] == rows:
        return empty(size, dtype, strides)
    storage = empty((columns * strides[1],), dtype)
    return storage.as_strided(size, strides) if is_traced(storage) else view_of(storage, size, strides, 0)

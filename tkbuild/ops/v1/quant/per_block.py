"""Casts in blocks of rows and columns, contract of release 1.0."""

from __future__ import annotations

import torch

from tkbuild.ops import quant
from tkbuild.ops.quant.types import QuantTensor


def per_block_cast(
    x: torch.Tensor,
    fmt: str,
    block_size: tuple[int, int],
    use_tma_aligned_col_major_sf: bool = False,
    round_sf: bool = False,
    use_packed_ue8m0: bool = False,
) -> QuantTensor:
    """Quantise in blocks of ``block_size`` rows and columns; returns (data, sf). See ``tkbuild.ops.quant``."""
    return quant.per_block_cast(x, fmt, block_size, use_tma_aligned_col_major_sf, round_sf, use_packed_ue8m0)


def per_block_cast_with_sf_only(
    x: torch.Tensor,
    fmt: str,
    block_size: tuple[int, int],
    use_tma_aligned_col_major_sf: bool = False,
    round_sf: bool = False,
    use_packed_ue8m0: bool = False,
) -> torch.Tensor:
    """Return the sf of ``per_block_cast``."""
    return quant.per_block_cast_with_sf_only(x, fmt, block_size, use_tma_aligned_col_major_sf, round_sf, use_packed_ue8m0)


def per_block_cast_with_precomputed_sf(
    x: torch.Tensor,
    fmt: str,
    block_size: tuple[int, int],
    sf: torch.Tensor,
    use_tma_aligned_col_major_sf: bool = False,
    round_sf: bool = False,
    use_packed_ue8m0: bool = False,
) -> torch.Tensor:
    """Return the data of x * (1 / sf), where each sf covers a block of ``block_size``. See ``tkbuild.ops.quant``."""
    return quant.per_block_cast_with_precomputed_sf(
        x, fmt, block_size, sf, use_tma_aligned_col_major_sf, round_sf, use_packed_ue8m0
    )

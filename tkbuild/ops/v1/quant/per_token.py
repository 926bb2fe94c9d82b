"""Casts of rows in blocks of columns, contract of release 1.0."""

from __future__ import annotations

import torch

from tkbuild.ops import quant
from tkbuild.ops.quant.types import QuantTensor


def per_token_cast(
    x: torch.Tensor,
    fmt: str,
    num_per_channels: int,
    x_block_size: tuple[int, int] | None = None,
    use_tma_aligned_col_major_sf: bool = False,
    round_sf: bool = False,
    use_packed_ue8m0: bool = False,
) -> QuantTensor:
    """Quantise each row in blocks of ``num_per_channels`` columns; returns (data, sf). See ``tkbuild.ops.quant``."""
    return quant.per_token_cast(x, fmt, num_per_channels, x_block_size, use_tma_aligned_col_major_sf, round_sf, use_packed_ue8m0)

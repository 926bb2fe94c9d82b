"""The pair that quantised data travels in."""

from __future__ import annotations

from typing import Any

import torch

from tkbuild.errors import ArgumentError

QuantTensor = tuple[torch.Tensor, torch.Tensor]
"""Quantised data with its scale factors."""


def pair_of(function: str, x: Any) -> QuantTensor:
    """Return ``x`` as (data, sf). Raises: ArgumentError unless it is a pair of tensors."""
    if not isinstance(x, (tuple, list)) or len(x) != 2 or not all(isinstance(part, torch.Tensor) for part in x):
        raise ArgumentError(f"{function}: x is a {type(x).__name__}, expected a pair of tensors (data, sf)")
    return x[0], x[1]


def block_of(function: str, name: str, block: Any) -> tuple[int, int]:
    """Return ``block`` as (rows, columns). Raises: ArgumentError unless it is two numbers."""
    if not isinstance(block, (tuple, list)) or len(block) != 2 or not all(isinstance(extent, int) for extent in block):
        raise ArgumentError(f"{function}: {name} is {block!r}, expected (rows, columns)")
    return block[0], block[1]

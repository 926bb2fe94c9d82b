"""Arithmetic that torch does not offer."""

from __future__ import annotations

import torch

#: Elements worked on at a time: float64 takes much memory.
_CHUNK = 2**24


def fma(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """Return a * b + c of float32 tensors, rounded once. Shapes: those of a, b and c broadcast together."""
    shape = torch.broadcast_shapes(a.shape, b.shape, c.shape)
    parts = zip(*(t.expand(shape).flatten().split(_CHUNK) for t in (a, b, c)), strict=True)
    return torch.cat([_fma_of_part(*part) for part in parts]).view(shape)


def _fma_of_part(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """The product is exact in float64. The sum is rounded to odd there, where it is inexact its last bit is 1, so that no tie
    arises that is none when it is rounded again, to float32.
    """
    product, addend = a.double() * b.double(), c.double()
    total = product + addend
    part = total - product
    error = (product - (total - part)) + (addend - part)
    bits = total.view(torch.int64)
    to_odd = (error != 0) & error.isfinite() & (bits & 1 == 0)
    away_from_zero = (error > 0) == (total > 0)
    return torch.where(to_odd, bits + torch.where(away_from_zero, 1, -1), bits).view(torch.float64).float()

"""Stochastic rounding: random bits from a hash of the data, and the rounding that they decide.

A magnitude becomes the next code if adding its 16 random bits to the first 16 bits that the target drops carries. Kernels for
sm_90a compute the same bits; those for sm_100a and sm_103a use instructions that share the hash, the two neighbours and the
expected value only.
"""

from __future__ import annotations

import torch

from tkbuild.reference.quant.rules import E2M1_MAX, E4M3_MAX

QUAD = 4
"""Values that share a hash."""

_RANDOM_BITS = 16
_HALF_MASK, _WORD_MASK = 0xFFFF, 0xFFFFFFFF
_FACTORS = (0x5671D42B, 0x9995E499, 0xACE1B8A5, 0xE153538D)
_FIRST_FACTOR, _LAST_FACTORS = 0x7FEB352D, (0x846CA68B, 0xD35A2D97)
_E4M3_MANTISSA, _E4M3_MIN_EXPONENT, _E4M3_NAN = 3, -6, 0x7F
_E2M1_MANTISSA, _E2M1_MIN_EXPONENT, _E2M1_NAN = 1, 0, 0x7
_F32_MANTISSA, _F32_BIAS = 23, 127
_BF16_NAN = 0x7FFF


def random_words(values: torch.Tensor, indices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return two 32-bit hashes of each quad of ``values`` and its index, as int64.

    Shapes: values (..., 4) float32, indices (...) integers, of which the low 32 bits count -> (...) twice.
    """
    bits = values.contiguous().view(torch.int32).to(torch.int64) & _WORD_MASK
    state = indices.to(torch.int64) & _WORD_MASK
    for place, factor in enumerate(_FACTORS):
        state = (state + bits[..., place] * factor) & _WORD_MASK
    state = ((state ^ state >> 23) * _FIRST_FACTOR) & _WORD_MASK
    state = state ^ state >> 16
    first, second = ((state * factor) & _WORD_MASK for factor in _LAST_FACTORS)
    return first ^ first >> 11, second ^ second >> 11


def random_bits_of_four(words: torch.Tensor) -> torch.Tensor:
    """Return the 16 random bits of each value of a quad that shares one word.

    The low half serves the first value and, its bits reversed, the second; so the high half the third and the fourth.
    Shapes: words (...) int64 -> (..., 4) int64.
    """
    low, high = words & _HALF_MASK, words >> _RANDOM_BITS
    return torch.stack((low, _reversed(low), high, _reversed(high)), dim=-1)


def random_bits_of_two(words: torch.Tensor) -> torch.Tensor:
    """Return the 16 random bits of each of the two values that share one word: its halves. Shapes: (...) -> (..., 2) int64."""
    return torch.stack((words & _HALF_MASK, words >> _RANDOM_BITS), dim=-1)


def stochastic_e4m3(values: torch.Tensor, random: torch.Tensor) -> torch.Tensor:
    """Return ``values`` (float32) as float8_e4m3fn: one of the two neighbours, saturating at +-448; NaN becomes 0x7F.

    random: 16 bits for each value, int64, of the same shape.
    """
    codes = _codes(values, random, _E4M3_MANTISSA, _E4M3_MIN_EXPONENT, E4M3_MAX)
    codes = codes | values.signbit().to(torch.int64) << 7
    return codes.masked_fill(values.isnan(), _E4M3_NAN).to(torch.uint8).view(torch.float8_e4m3fn)


def stochastic_e2m1(values: torch.Tensor, random: torch.Tensor) -> torch.Tensor:
    """Return the e2m1 codes of ``values`` (float32) as uint8 0 to 15, as ``stochastic_e4m3``; saturating at +-6, NaN becomes +6."""
    codes = _codes(values, random, _E2M1_MANTISSA, _E2M1_MIN_EXPONENT, E2M1_MAX)
    codes = codes | values.signbit().to(torch.int64) << 3
    return codes.masked_fill(values.isnan(), _E2M1_NAN).to(torch.uint8)


def stochastic_bf16(values: torch.Tensor, random: torch.Tensor) -> torch.Tensor:
    """Return ``values`` (float32) as bfloat16, as ``stochastic_e4m3``.

    Above the largest bfloat16 the neighbours are it and infinity. NaN becomes 0x7FFF.
    """
    bits = values.contiguous().view(torch.int32).to(torch.int64) & _WORD_MASK
    rounded = (bits + random >> _RANDOM_BITS).masked_fill(values.isnan(), _BF16_NAN)
    return rounded.to(torch.int16).view(torch.bfloat16)


def _codes(values: torch.Tensor, random: torch.Tensor, mantissa: int, min_exponent: int, largest: float) -> torch.Tensor:
    """Return the codes, without sign, of float32 values in a format with ``mantissa`` bits and subnormal numbers.

    Codes count through the numbers of the format. In units of 2**-16 of its step, a number lies at the code below it plus a
    fraction of which 16 bits are kept; for normal numbers these follow from the bits of the value, shifted.
    """
    magnitude = values.abs().nan_to_num(0.0).clamp(max=largest)
    step = 2.0 ** (min_exponent - mantissa)
    below_normal = torch.floor(magnitude * (2.0**_RANDOM_BITS / step))
    bits = magnitude.view(torch.int32).to(torch.int64)
    bias = _F32_BIAS + min_exponent - 1
    normal = (bits - (bias << _F32_MANTISSA)) >> (_F32_MANTISSA - mantissa - _RANDOM_BITS)
    position = torch.where(magnitude < 2.0**min_exponent, below_normal.to(torch.int64), normal)
    return position + random >> _RANDOM_BITS


def _reversed(halves: torch.Tensor) -> torch.Tensor:
    """Return 16-bit numbers with the order of their bits reversed."""
    for shift, mask in ((8, 0x00FF), (4, 0x0F0F), (2, 0x3333), (1, 0x5555)):
        halves = (halves & mask) << shift | halves >> shift & mask
    return halves

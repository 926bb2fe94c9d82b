"""The references of the element-wise casts: bits computed by hand, and the properties of stochastic rounding."""

from __future__ import annotations

import pytest
import torch

from tkbuild.reference import quant
from tkbuild.reference.quant import rules, stochastic

NAN, INF = float("nan"), float("inf")
E4M3 = torch.float8_e4m3fn
ALL_HALVES = torch.arange(2**16)


def f32(*bits: int) -> torch.Tensor:
    return torch.tensor(bits, dtype=torch.int64).to(torch.int32).view(torch.float32)


def codes(x: torch.Tensor) -> list[int]:
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[x.element_size()]
    return [value % 2 ** (8 * x.element_size()) for value in x.view(integer).tolist()]


# ---- nearest


def test_to_bfloat16() -> None:
    x = f32(0x3F808000, 0x3F818000, 0x3F808001, 0x7F7FFFFF, 0xFF800000, 0x7F800001, 0x80000000, 0x00008001)
    assert codes(quant.cast(x, out_dtype="bfloat16")) == [0x3F80, 0x3F82, 0x3F81, 0x7F80, 0xFF80, 0x7FFF, 0x8000, 0x0001]


def test_to_float16() -> None:
    x = torch.tensor([1.0, 65504.0, 65520.0, -INF, NAN, 2.0**-24, 2.0**-25, 2.0**-25 * 1.5])
    assert codes(quant.cast(x, out_dtype="float16")) == [0x3C00, 0x7BFF, 0x7C00, 0xFC00, 0x7FFF, 0x0001, 0x0000, 0x0001]


def test_to_e4m3_saturates() -> None:
    x = torch.tensor([448.0, 464.0, 1e9, -INF, NAN, -0.0, 17.0, 19.0])
    for source in (x, x.bfloat16()):
        assert codes(quant.cast(source, out_dtype="float8_e4m3fn")) == [0x7E, 0x7E, 0x7E, 0xFE, 0x7F, 0x80, 0x58, 0x5A]


def test_to_float32_is_exact() -> None:
    for dtype in (torch.bfloat16, torch.float16, E4M3):
        x = torch.tensor([1.0, -0.0, 448.0, 2.0**-9]).to(dtype)
        assert quant.cast(x, out_dtype="float32").tolist() == [1.0, -0.0, 448.0, 2.0**-9]
    nan = torch.tensor([0x7FC1], dtype=torch.int16).view(torch.bfloat16)
    assert codes(quant.cast(nan, out_dtype="float32")) == [0x7FC10000]
    assert codes(quant.cast(torch.tensor([NAN]).half(), out_dtype="float32")) == [0x7FFFFFFF]


# ---- random bits


def hashes_by_hand(bits: list[int], index: int) -> tuple[int, int]:
    mask = 0xFFFFFFFF
    h = index & mask
    for word, factor in zip(bits, (0x5671D42B, 0x9995E499, 0xACE1B8A5, 0xE153538D), strict=True):
        h = (h + word * factor) & mask
    h ^= h >> 23
    h = h * 0x7FEB352D & mask
    h ^= h >> 16
    first, second = h * 0x846CA68B & mask, h * 0xD35A2D97 & mask
    return first ^ first >> 11, second ^ second >> 11


@pytest.mark.parametrize("index", [0, 1, 2**31, 2**32 - 1, 2**32 + 5])
def test_hashes(index: int) -> None:
    bits = [0x3F800000, 0xBF000001, 0x7FFFFFFF, 0x00000001]
    first, second = stochastic.random_words(f32(*bits).view(1, 4), torch.tensor([index]))
    assert (first.item(), second.item()) == hashes_by_hand(bits, index)


def test_which_bits_serve_which_value() -> None:
    word = torch.tensor([0x80010003])
    assert stochastic.random_bits_of_four(word).tolist() == [[0x0003, 0xC000, 0x8001, 0x8001]]
    assert stochastic.random_bits_of_four(torch.tensor([0x12345678])).tolist() == [[0x5678, 0x1E6A, 0x1234, 0x2C48]]
    assert stochastic.random_bits_of_two(torch.tensor([0x12345678])).tolist() == [[0x5678, 0x1234]]


# ---- rounding: over all random bits, as many go up as the place between the neighbours says


def share_going_up(results: torch.Tensor, low: float, high: float) -> int:
    values = results.float()
    assert ((values == low) | (values == high)).all()
    return int((values == high).sum())


@pytest.mark.parametrize(
    ("value", "low", "high", "count"),
    [
        (1.0, 1.0, 1.125, 0),
        (1.0625, 1.0, 1.125, 32768),
        (-1.03125, -1.0, -1.125, 16384),
        (447.0, 416.0, 448.0, 63488),
        (448.0, 448.0, 448.0, 65536),
        (1e9, 448.0, 448.0, 65536),
        (2.0**-10, 0.0, 2.0**-9, 32768),
        (2.0**-12, 0.0, 2.0**-9, 8192),
        (2.0**-25, 0.0, 2.0**-9, 1),
        (2.0**-26, 0.0, 2.0**-9, 0),
        (1e-45, 0.0, 2.0**-9, 0),
        (2.0**-6 - 2.0**-10, 7 * 2.0**-9, 2.0**-6, 32768),
        (2.0**-6 + 2.0**-10, 2.0**-6, 9 * 2.0**-9, 32768),
    ],
)
def test_e4m3_shares(value: float, low: float, high: float, count: int) -> None:
    results = stochastic.stochastic_e4m3(torch.full((2**16,), value), ALL_HALVES)
    assert share_going_up(results, low, high) == count


@pytest.mark.parametrize(
    ("value", "low", "high", "count"),
    [(1.0, 1.0, 1.5, 0), (1.25, 1.0, 1.5, 32768), (5.0, 4.0, 6.0, 32768), (-0.125, 0.0, -0.5, 16384), (100.0, 6.0, 6.0, 65536)],
)
def test_e2m1_shares(value: float, low: float, high: float, count: int) -> None:
    results = rules.e2m1_values(stochastic.stochastic_e2m1(torch.full((2**16,), value), ALL_HALVES))
    assert share_going_up(results, low, high) == count


@pytest.mark.parametrize(
    ("bits", "low", "high", "count"),
    [
        (0x3F800000, 0x3F80, 0x3F81, 0),
        (0x3F800001, 0x3F80, 0x3F81, 1),
        (0xBF80C000, 0xBF80, 0xBF81, 49152),
        (0x00000100, 0x0000, 0x0001, 256),
        (0x7F7F8000, 0x7F7F, 0x7F80, 32768),
        (0x7F800000, 0x7F80, 0x7F80, 65536),
    ],
)
def test_bfloat16_shares(bits: int, low: int, high: int, count: int) -> None:
    found = codes(stochastic.stochastic_bf16(f32(bits).expand(2**16), ALL_HALVES))
    assert set(found) <= {low, high}
    assert found.count(high) == count


def test_special_values_do_not_depend_on_the_random_bits() -> None:
    x, random = torch.tensor([NAN, -NAN, INF, -INF, 0.0, -0.0]), torch.full((6,), 0xFFFF)
    assert codes(stochastic.stochastic_e4m3(x, random)) == [0x7F, 0x7F, 0x7E, 0xFE, 0x00, 0x80]
    assert stochastic.stochastic_e2m1(x, random).tolist() == [7, 7, 7, 15, 0, 8]
    assert codes(stochastic.stochastic_bf16(x, random)) == [0x7FFF, 0x7FFF, 0x7F80, 0xFF80, 0x0000, 0x8000]


# ---- the cast


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn"])
def test_the_cast_is_unbiased_and_deterministic(dtype: str) -> None:
    x = torch.full((400000,), 0.3)
    out = quant.cast_stochastic(x, out_dtype=dtype)
    assert torch.equal(out.view(torch.uint8), quant.cast_stochastic(x, out_dtype=dtype).view(torch.uint8))
    step = {"bfloat16": 2.0**-9, "float8_e4m3fn": 2.0**-5}[dtype]
    assert out.float().unique().numel() == 2
    for place in range(4):
        assert abs(out[place::4].double().mean() - 0.3) < 6 * step / 2 / 100000**0.5


def test_bfloat16_and_float32_of_equal_values_agree() -> None:
    x = torch.randn(4096, generator=torch.Generator().manual_seed(1)).bfloat16()
    ours, theirs = (quant.cast_stochastic(values, out_dtype="float8_e4m3fn") for values in (x, x.float()))
    assert torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8))


def test_exact_values_do_not_change() -> None:
    x = torch.randn(4096, generator=torch.Generator().manual_seed(2)).to(E4M3).float()
    assert torch.equal(quant.cast_stochastic(x, out_dtype="float8_e4m3fn").float(), x)
    assert torch.equal(quant.cast_stochastic(x, out_dtype="bfloat16").float(), x)


def test_no_elements() -> None:
    assert quant.cast_stochastic(torch.zeros(0), out_dtype="bfloat16").dtype == torch.bfloat16
    assert quant.cast(torch.zeros(0), out_dtype="float8_e4m3fn").shape == (0,)

"""The references of casts in blocks of columns against bits computed by hand: e2m1, e4m3 scales, given scales, quantised input."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from tkbuild.reference import quant

NAN, INF = float("nan"), float("inf")
LEAST_E2M1 = 6 * 2.0**-126
E4M3_ONE = 0x38


def float_of(bits: int) -> float:
    return float(struct.unpack("<f", struct.pack("<I", bits))[0])


def bits_of(values: torch.Tensor) -> list[int]:
    return [word & 0xFFFFFFFF for word in values.contiguous().view(torch.int32).flatten().tolist()]


def codes_of(data: torch.Tensor) -> list[int]:
    """The bytes of e4m3 data, the 4-bit codes of e2m1 data."""
    stored = [int(code) for code in data.contiguous().flatten().view(torch.uint8).tolist()]
    return stored if data.dtype != torch.int8 else [half for byte in stored for half in (byte & 0xF, byte >> 4)]


def row(*values: float, columns: int = 64) -> torch.Tensor:
    return torch.tensor([[*values, *[0.0] * (columns - len(values))]])


def e4m3(codes: Sequence[int]) -> torch.Tensor:
    return torch.tensor(codes, dtype=torch.uint8).view(torch.float8_e4m3fn)


def cast(x: torch.Tensor, **changed: Any) -> tuple[torch.Tensor, torch.Tensor]:
    given = {"fmt": "e2m1", "block": 32, "sf_format": "f32", "round_sf": 0, "amax_min": LEAST_E2M1, "col_major": False}
    return quant.per_token_cast(x, **{**given, **changed})


def cast_stochastic(x: torch.Tensor, **changed: Any) -> tuple[torch.Tensor, torch.Tensor]:
    given = {"fmt": "e4m3", "block": 64, "sf_format": "f32", "round_sf": 0, "amax_min": 1e-4, "col_major": False}
    return quant.per_token_cast_stochastic(x, **{**given, **changed})


def recast(x: torch.Tensor, x_sf: torch.Tensor, **changed: Any) -> tuple[torch.Tensor, torch.Tensor]:
    given = {"fmt": "e4m3", "block": 64, "sf_format": "f32", "round_sf": 0, "amax_min": 1e-4, "col_major": False, "xm": 1, "xk": 32}
    return quant.per_token_recast(x, x_sf, **{**given, **changed})


# ---- e2m1


def test_every_tie_and_sign_of_e2m1() -> None:
    values = [0.0, -0.0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -5.0, 6.0, -6.0, 0.2500001, 5.000001, NAN, -1.0]
    data, sf = cast(row(*values))
    assert sf.tolist() == [[1.0, 2.0**-126]]
    assert codes_of(data)[:16] == [0, 8, 0, 2, 2, 4, 4, 6, 6, 0xE, 7, 0xF, 1, 7, 7, 0xA]
    assert codes_of(data)[16:] == [0] * 48


def test_even_columns_are_in_the_low_half() -> None:
    data, _ = cast(row(1.0, 6.0, -0.5))
    assert (data.dtype, data.shape) == (torch.int8, (1, 32))
    assert data.view(torch.uint8)[0, :2].tolist() == [0x72, 0x09]


@pytest.mark.parametrize(
    ("amax", "sf", "rounded"),
    [
        (6.0, 0x3F800000, 0x3F800000),
        (6.000001, 0x3F800001, 0x40000000),
        (3.0, 0x3F000000, 0x3F000000),
        (1.0, 0x3E2AAAAB, 0x3E800000),
    ],
)
def test_scales_of_e2m1(amax: float, sf: int, rounded: int) -> None:
    assert bits_of(cast(row(amax))[1])[0] == sf
    assert bits_of(cast(row(amax), round_sf=1)[1])[0] == rounded
    assert bits_of(cast(row(amax), sf_format="ue8m0")[1]) == [rounded >> 23 | 1 << 8]


def test_zero_blocks_of_e2m1_have_the_least_normal_scale() -> None:
    data, sf = cast(torch.zeros(1, 64))
    assert bits_of(sf) == [0x00800000] * 2
    assert codes_of(data) == [0] * 64


@pytest.mark.parametrize("round_sf", [0, 1])
def test_an_infinite_element_concerns_its_block_only(round_sf: int) -> None:
    x = torch.full((1, 64), 6.0)
    x[0, 5] = -INF
    data, sf = cast(x, round_sf=round_sf)
    assert sf.tolist() == [[INF, 1.0]]
    assert codes_of(data) == [0] * 5 + [7] + [0] * 26 + [7] * 32


# ---- e4m3 scales


@pytest.mark.parametrize(
    ("amax", "code"),
    [
        (448.0, E4M3_ONE),
        (476.0, E4M3_ONE),  # 1.0625, between 1 and 1.125: to even
        (504.0, 0x39),
        (448.0 * 448, 0x7E),
        (1e9, 0x7E),  # saturates
        (INF, 0x7E),
        (0.0, 0x01),  # the clamp minimum: the smallest subnormal
    ],
)
def test_e4m3_scales(amax: float, code: int) -> None:
    _, sf = cast(row(amax), fmt="e4m3", sf_format="e4m3", amax_min=0.875, block=64)
    assert (sf.dtype, codes_of(sf)) == (torch.float8_e4m3fn, [code])


def test_the_factor_of_an_e4m3_scale_is_its_inverse_and_products_saturate() -> None:
    data, sf = cast(row(476.0, 448.0, 224.0), fmt="e4m3", sf_format="e4m3", amax_min=0.875, block=64)
    assert sf.float().tolist() == [[1.0]]
    assert codes_of(data)[:3] == [0x7E, 0x7E, 0x76]
    data, _ = cast(row(1e9, 448.0 * 448, INF, NAN), fmt="e4m3", sf_format="e4m3", amax_min=0.875, block=64)
    assert codes_of(data)[:4] == [0x7E, 0x7E, 0x7E, 0x7F]
    data, _ = cast(row(1e9, -1e9, 3.0 * 448, NAN), sf_format="e4m3", block=64)
    assert codes_of(data)[:4] == [7, 0xF, 5, 7]


def test_an_e4m3_scale_is_never_0() -> None:
    data, sf = cast(torch.zeros(1, 64), sf_format="e4m3", amax_min=1e-30)
    assert codes_of(sf) == [1, 1]
    assert codes_of(data) == [0] * 64


def test_e4m3_scales_do_not_become_powers_of_two() -> None:
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(0))
    for one, other in zip(cast(x, sf_format="e4m3", round_sf=0), cast(x, sf_format="e4m3", round_sf=1), strict=True):
        assert codes_of(one) == codes_of(other)


def test_columns_of_e4m3_scales_are_16_apart() -> None:
    x = torch.arange(1, 6)[:, None] * torch.tensor([6.0, 12.0]).repeat_interleave(32)
    _, sf = cast(x, sf_format="e4m3", col_major=True)
    assert (sf.shape, sf.stride()) == ((5, 2), (1, 16))
    assert sf.float().tolist() == [[float(i), 2.0 * i] for i in range(1, 6)]


# ---- blocks


@pytest.mark.parametrize("block", [16, 32, 64, 128])
def test_each_block_has_its_own_scale(block: int) -> None:
    blocks = -(-192 // block)
    wanted = [2.0 ** (i % 7) for i in range(blocks)]
    x = (torch.tensor([wanted]).repeat_interleave(block, dim=1) * 6)[:, :192]
    data, sf = cast(x, block=block)
    assert sf.tolist() == [wanted]
    assert codes_of(data) == [7] * 192


# ---- stochastic rounding


def halves_by_hand(bits: list[int], index: int) -> list[int]:
    """The 16 random bits of each value of the quad ``index``, whose values have the float32 bits ``bits``."""
    mask = 0xFFFFFFFF
    h = index
    for word, factor in zip(bits, (0x5671D42B, 0x9995E499, 0xACE1B8A5, 0xE153538D), strict=True):
        h = (h + word * factor) & mask
    h = (h ^ h >> 23) * 0x7FEB352D & mask
    h = (h ^ h >> 16) * 0x846CA68B & mask
    h ^= h >> 11
    low, high = f"{h & 0xFFFF:016b}", f"{h >> 16:016b}"
    return [int(digits, 2) for digits in (low, low[::-1], high, high[::-1])]


@pytest.mark.parametrize("quad", [0, 1, 5, 15])
def test_random_bits_come_from_the_products_and_their_column(quad: int) -> None:
    """Between 1 and 1.125 are 2**16 steps; a value goes up if its place among them and its random bits together reach the next."""
    places = [0x1000, 0x7FFF, 0x8000, 0xF000]
    x = torch.full((2, 64), 448.0)
    x[:, 4 * quad : 4 * quad + 4] = torch.tensor([1 + place * 2.0**-19 for place in places])
    random = halves_by_hand(bits_of(x[0, 4 * quad : 4 * quad + 4]), quad)
    data, sf = cast_stochastic(x)
    assert sf.tolist() == [[1.0]] * 2
    wanted = [0x39 if place + bits >= 2**16 else 0x38 for place, bits in zip(places, random, strict=True)]
    for row_codes in data:
        assert codes_of(row_codes)[4 * quad : 4 * quad + 4] == wanted


@pytest.mark.parametrize("sf_format", ["f32", "ue8m0", "e4m3"])
@pytest.mark.parametrize("fmt", ["e4m3", "e2m1"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_stochastic_codes_are_those_of_neighbours_and_scales_the_usual_ones(sf_format: str, fmt: str, dtype: torch.dtype) -> None:
    x = torch.randn(33, 192, generator=torch.Generator().manual_seed(7)).to(dtype)
    given = {"fmt": fmt, "sf_format": sf_format, "block": 64, "col_major": True, "amax_min": 1e-4}
    data, sf = cast_stochastic(x, **given)
    nearest, wanted = cast(x, **given)
    assert (sf.stride(), codes_of(sf)) == (wanted.stride(), codes_of(wanted))
    distances = torch.tensor(codes_of(data)) - torch.tensor(codes_of(nearest))
    assert set(distances.tolist()) == {-1, 0, 1}


@pytest.mark.parametrize("fmt", ["e4m3", "e2m1"])
def test_the_stochastic_cast_is_unbiased(fmt: str) -> None:
    largest = {"e4m3": 448.0, "e2m1": 6.0}[fmt]
    x = torch.full((1, 2**18), 1.3)
    x[:, ::64] = largest
    values = quant.per_token_cast_and_cast_back(x, fmt=fmt, block=64, round_sf=0, e4m3_sf=0, amax_min=1e-4)
    data, _ = cast_stochastic(x, fmt=fmt)
    found = data.float() if fmt == "e4m3" else quant.rules.e2m1_values(quant.rules.unpack_e2m1(data))
    rounded = found.view(-1, 64)[:, 4:]
    step = {"e4m3": 0.125, "e2m1": 0.5}[fmt]
    assert rounded.unique().numel() == 2
    assert values[0, 1].item() in rounded.unique().tolist()
    for place in range(4):
        assert abs(rounded[:, place::4].double().mean() - 1.3) < 6 * step / 2 / (2**18 / 64 * 15) ** 0.5


@pytest.mark.parametrize("fmt", ["e4m3", "e2m1"])
def test_stochastic_rounding_keeps_what_the_format_has(fmt: str) -> None:
    x = row(448.0, -448.0, 0.0, -0.0, NAN) if fmt == "e4m3" else row(6.0, -6.0, 0.0, -0.0, NAN, 0.5, -3.0)
    for ours, theirs in zip(cast_stochastic(x, fmt=fmt), cast(x, fmt=fmt, block=64, amax_min=1e-4), strict=True):
        assert codes_of(ours) == codes_of(theirs)


# ---- scales only, given scales


@pytest.mark.parametrize("sf_format", ["f32", "ue8m0", "e4m3"])
@pytest.mark.parametrize(("fmt", "largest"), [("e4m3", 448.0), ("e2m1", 6.0)])
def test_scales_only_are_those_of_the_cast(sf_format: str, fmt: str, largest: float) -> None:
    x = torch.randn(5, 192, generator=torch.Generator().manual_seed(3))
    same = {"block": 64, "sf_format": sf_format, "round_sf": 0, "amax_min": 1e-4, "col_major": True}
    alone, wanted = quant.per_token_cast_with_sf_only(x, largest=largest, **same), cast(x, fmt=fmt, **same)[1]
    assert (alone.stride(), codes_of(alone)) == (wanted.stride(), codes_of(wanted))


def test_given_scales_are_inverted_once() -> None:
    """1 / 3 is 0x3EAAAAAB; 4.5 and 9 times that round to 1.5 and 3."""
    data = quant.per_token_cast_with_precomputed_sf(row(4.5, 9.0, 1e30, -1e30, NAN), torch.tensor([[3.0]]), fmt="e4m3", block=64)
    assert codes_of(data)[:5] == [0x3C, 0x44, 0x7E, 0xFE, 0x7F]


@pytest.mark.parametrize(("sf", "codes"), [(0.0, [7, 0xF, 7]), (INF, [0, 8, 0]), (NAN, [7, 7, 7]), (-1.0, [0xA, 2, 8])])
def test_scales_that_cannot_be_inverted(sf: float, codes: list[int]) -> None:
    data = quant.per_token_cast_with_precomputed_sf(row(1.0, -1.0), torch.tensor([[sf]]), fmt="e2m1", block=64)
    assert codes_of(data)[:3] == codes


@pytest.mark.parametrize("fmt", ["e4m3", "e2m1"])
def test_given_rounded_scales_reproduce_the_cast(fmt: str) -> None:
    x = torch.randn(5, 192, generator=torch.Generator().manual_seed(4)).bfloat16()
    for given in ({"round_sf": 1}, {"sf_format": "e4m3"}):
        data, sf = cast(x, fmt=fmt, **given)
        assert codes_of(quant.per_token_cast_with_precomputed_sf(x, sf, fmt=fmt, block=32)) == codes_of(data)


# ---- there and back


def test_cast_and_cast_back_rounds_to_what_the_format_holds() -> None:
    same = {"block": 64, "round_sf": 0, "e4m3_sf": 0}
    back = quant.per_token_cast_and_cast_back(row(448.0, 17.0, 19.0, -1.1), fmt="e4m3", amax_min=1e-4, **same)
    assert back[0, :5].tolist() == [448.0, 16.0, 20.0, -1.125, 0.0]
    back = quant.per_token_cast_and_cast_back(row(6.0, 5.0, -2.5, 0.3).bfloat16(), fmt="e2m1", amax_min=1e-4, **same)
    assert (back.dtype, back[0, :5].tolist()) == (torch.bfloat16, [6.0, 4.0, -2.0, 0.5, 0.0])


@pytest.mark.parametrize("sf_format", ["f32", "e4m3"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_cast_and_cast_back_is_the_product_of_codes_and_scales(sf_format: str, dtype: torch.dtype) -> None:
    x = torch.randn(5, 192, generator=torch.Generator().manual_seed(5)).to(dtype)
    data, sf = cast(x, fmt="e4m3", sf_format=sf_format, block=64)
    wanted = (data.float() * sf.float().repeat_interleave(64, dim=1)).to(dtype)
    same = {"block": 64, "round_sf": 0, "amax_min": LEAST_E2M1}
    assert torch.equal(quant.per_token_cast_and_cast_back(x, fmt="e4m3", e4m3_sf=int(sf_format == "e4m3"), **same), wanted)


def test_infinities_and_nan_on_the_way_back() -> None:
    x = torch.cat((row(INF, 1.0, NAN), row(NAN, 6.0)), dim=1)
    same = {"block": 64, "round_sf": 0, "e4m3_sf": 0, "amax_min": 1e-4}
    assert bits_of(quant.per_token_cast_and_cast_back(x, fmt="e4m3", **same))[:65] == [0x7FFFFFFF] * 65
    back = quant.per_token_cast_and_cast_back(x, fmt="e2m1", **same)
    assert bits_of(back)[:3] == [0x7F800000, 0x7FFFFFFF, 0x7F800000]
    assert back[0, 64:67].tolist() == [6.0, 6.0, 0.0]


# ---- quantised input


def test_recast_finds_the_scale_of_each_element() -> None:
    """Rows 0 and 1 share scales, and 32 columns do: the largest product of row 2 is 2 * 8."""
    x = e4m3([0x40] * 3 * 64).view(3, 64)  # 2
    data, sf = recast(x, torch.tensor([[1.0, 4.0], [8.0, 0.25]]), xm=2, round_sf=1)
    assert sf.tolist() == [[2.0**-5], [2.0**-5], [2.0**-4]]
    assert data.float()[:, 0].tolist() == [64.0, 64.0, 256.0]
    assert data.float()[:, 32].tolist() == [256.0, 256.0, 8.0]


def test_recast_multiplies_the_scales_first() -> None:
    """448 / (448 * 3) is 0x3EAAAAAB; times 3 that rounds to 1, so that the codes stay what they are."""
    codes = [0x7E, 0x01, 0x08, 0xB9, *[0] * 60]
    data, sf = recast(e4m3(codes).view(1, 64), torch.full((1, 2), 3.0))
    assert (codes_of(data), sf.tolist()) == (codes, [[3.0]])


def test_recast_of_e2m1_with_packed_scales_to_e4m3() -> None:
    x = torch.tensor([[0x72] + [0] * 15 + [0x0F] + [0] * 15], dtype=torch.uint8).view(torch.int8)  # 1, 6, .., -6
    words = torch.tensor([[127 | 129 << 8 | 0xABCD0000 - (1 << 32)]], dtype=torch.int64).to(torch.int32)  # 1, 4
    data, sf = recast(x, words, sf_format="ue8m0")
    assert bits_of(sf) == [123]  # 24 / 448 -> 2**-4
    assert data.float()[0, [0, 1, 32]].tolist() == [16.0, 96.0, -384.0]


def test_recast_ignores_nan_and_keeps_it() -> None:
    x = e4m3([0x7F, 0x38, 0xFF, *[0x30] * 61]).view(1, 64)  # NaN, 1, NaN, 0.5
    data, sf = recast(x, torch.tensor([[448.0, NAN]]))
    assert sf.tolist() == [[1.0]]
    assert codes_of(data) == [0x7F, 0x7E, 0x7F, *[0x76] * 29, *[0x7F] * 32]
    data, _ = recast(x, torch.tensor([[448.0, NAN]]), fmt="e2m1")
    assert codes_of(data) == [7, 7, 7, *[5] * 29, *[7] * 32]


def test_recast_with_scales_of_one_is_the_cast_of_the_values() -> None:
    x = torch.randn(5, 192, generator=torch.Generator().manual_seed(6)).to(torch.float8_e4m3fn)
    for fmt in ("e4m3", "e2m1"):
        given = {"fmt": fmt, "block": 64, "amax_min": 1e-4}
        for ours, theirs in zip(recast(x, torch.ones(5, 6), **given), cast(x.float(), **given), strict=True):
            assert codes_of(ours) == codes_of(theirs)


@pytest.mark.parametrize("sf_format", ["f32", "ue8m0", "e4m3"])
def test_no_rows(sf_format: str) -> None:
    data, sf = cast(torch.zeros(0, 192), sf_format=sf_format, col_major=True)
    assert (data.shape, sf.shape) == ((0, 96), (0, 2 if sf_format == "ue8m0" else 6))
    assert cast_stochastic(torch.zeros(0, 192), sf_format=sf_format)[0].shape == (0, 192)
    data, sf = recast(torch.zeros(0, 192, dtype=torch.float8_e4m3fn), torch.zeros(0, 6), sf_format=sf_format)
    assert (data.shape, sf.shape) == ((0, 192), (0, 1 if sf_format == "ue8m0" else 3))

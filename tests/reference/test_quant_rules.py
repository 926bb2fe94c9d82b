"""The quantisation references against bits computed by hand."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from tkbuild.reference import quant
from tkbuild.reference.quant import rules

NAN, INF = float("nan"), float("inf")


def float_of(bits: int) -> float:
    return float(struct.unpack("<f", struct.pack("<I", bits))[0])


def bits_of(values: torch.Tensor) -> list[int]:
    return [word & 0xFFFFFFFF for word in values.contiguous().view(torch.int32).flatten().tolist()]


def codes_of(data: torch.Tensor) -> list[int]:
    return [int(code) for code in data.view(torch.uint8).flatten().tolist()]


def e4m3(codes: Sequence[int]) -> torch.Tensor:
    return torch.tensor(codes, dtype=torch.uint8).view(torch.float8_e4m3fn)


def cast(x: torch.Tensor, **changed: Any) -> tuple[torch.Tensor, torch.Tensor]:
    given: dict[str, Any] = {"block": 128, "sf_format": "f32", "round_sf": 0, "amax_min": 1e-4, "col_major": False}
    return quant.per_token_cast(x, **{**given, **changed})


# ---- the scale rule


@pytest.mark.parametrize(
    ("amax", "sf", "inv"),
    [
        (0x43E00000, 0x3F800000, 0x3F800000),  # 448
        (0x43E00001, 0x3F800001, 0x3F7FFFFF),  # one ulp above; 1 / sf would be 0x3F7FFFFE
        (0x43DFFFFF, 0x3F7FFFFF, 0x3F800001),  # one ulp below
        (0x44600000, 0x40000000, 0x3F000000),  # 896
        (0x3F800000, 0x3B124925, 0x43E00000),  # 1; 1 / sf would be 0x43DFFFFF
        (0x40400000, 0x3BDB6DB7, 0x43155555),  # 3
        (0x38D1B717, 0x346FACAD, 0x4A88B800),  # 1e-4, the clamp minimum itself
        (0x38D1B716, 0x346FACAD, 0x4A88B800),  # one ulp below the minimum
        (0x00000000, 0x346FACAD, 0x4A88B800),
        (0x7F800000, 0x7F800000, 0x00000000),  # infinity
    ],
)
def test_unrounded_scale_and_its_inverse_are_two_divisions(amax: int, sf: int, inv: int) -> None:
    _, found_sf, found_inv = rules.scales(torch.tensor([float_of(amax)]), 1e-4, rounded=False)
    assert (bits_of(found_sf), bits_of(found_inv)) == ([sf], [inv])


@pytest.mark.parametrize(
    ("amax", "field"),
    [
        (0x43E00000, 127),  # 448: exactly 2**0
        (0x43E00001, 128),  # one ulp above goes up
        (0x43DFFFFF, 127),
        (0x44600000, 128),  # 896
        (0x43600000, 126),  # 224
        (0x43600001, 127),
        (0x3F800000, 119),  # 1 / 448 -> 2**-8
        (0x7F7FFFFF, 247),  # the largest number: 2**120
        (0x7F800000, 255),  # infinity
        (0x00000000, 105),  # the clamp minimum 1e-4: 2**-22
    ],
)
def test_rounded_scale_is_the_next_power_of_two(amax: int, field: int) -> None:
    fields, sf, inv = rules.scales(torch.tensor([float_of(amax)]), 1e-4, rounded=True)
    assert fields.tolist() == [field]
    assert bits_of(sf) == [field << 23]
    assert bits_of(inv) == [max(254 - field, 0) << 23]


def test_rounded_scale_ends_at_the_smallest_normal_number() -> None:
    amax = torch.tensor([448 * 2.0**-126, 448 * 2.0**-125, 1e-42, 0.0])
    fields, _, _ = rules.scales(amax, 0.0, rounded=True)
    assert fields.tolist() == [1, 2, 1, 1]


@pytest.mark.parametrize("exponent", [0, 1, 7, 8, 9, 100, 127, 135, 200, 254])
def test_the_exponent_without_division_equals_the_rounded_quotient(exponent: int) -> None:
    """The kernels add to the bits of amax instead of dividing; every mantissa of an exponent is tried."""
    bits = (exponent << 23) + torch.arange(1 << 23, dtype=torch.int32)
    shortcut = (((bits + 0x1FFFFF) >> 23) - 8).clamp(min=1)
    amax = bits.view(torch.float32)
    assert torch.equal(rules.exponent_fields(amax / torch.full_like(amax, 448.0)), shortcut)


def test_the_clamp_minimum_is_an_argument() -> None:
    _, sf = cast(torch.ones(1, 128), amax_min=896.0)
    assert sf.tolist() == [[2.0]]


# ---- e4m3


@pytest.mark.parametrize(
    ("value", "code"),
    [
        (0.0, 0x00),
        (-0.0, 0x80),
        (1.0, 0x38),
        (-1.5, 0xBC),
        (447.0, 0x7E),
        (448.0, 0x7E),
        (463.9, 0x7E),
        (464.0, 0x7E),
        (480.0, 0x7E),
        (1e5, 0x7E),
        (-1e5, 0xFE),
        (INF, 0x7E),
        (-INF, 0xFE),
        (NAN, 0x7F),
        (-NAN, 0x7F),
        (17.0, 0x58),  # between 16 and 18: to even
        (19.0, 0x5A),  # between 18 and 20: to even
        (2.0**-9, 0x01),  # the smallest subnormal
        (2.0**-10, 0x00),  # half of it: to even
        (2.0**-10 * 1.0001, 0x01),
        (3 * 2.0**-10, 0x02),
        (2.0**-6, 0x08),  # the smallest normal
    ],
)
def test_rounding_to_e4m3(value: float, code: int) -> None:
    assert codes_of(rules.round_to_e4m3(torch.tensor([value]))) == [code]


def test_a_value_is_multiplied_by_inv_not_divided_by_sf() -> None:
    """11384539 * 2**-32 times 448 rounds to 1.1875, a tie that goes to 1.25; over sf, or times 1 / sf, it is below the tie."""
    data, _ = cast(torch.tensor([[1.0, float_of(0x3B2DB6DB)]]), block=32)
    assert codes_of(data) == [0x7E, 0x3A]


# ---- per_token_cast


def test_zero_groups_give_zero_codes_and_the_scale_of_the_minimum() -> None:
    data, sf = cast(torch.zeros(5, 384))
    assert codes_of(data) == [0] * 5 * 384
    assert bits_of(sf) == [0x346FACAD] * 15
    _, words = cast(torch.zeros(5, 384), sf_format="ue8m0")
    assert bits_of(words) == [0x00696969] * 5
    assert torch.equal(quant.cast_back(data, sf, out_dtype="float32", bm=1, bk=128), torch.zeros(5, 384))


def test_a_zero_group_between_others() -> None:
    x = torch.cat([torch.full((1, 128), 448.0), torch.zeros(1, 128), torch.full((1, 128), 896.0)], dim=1)
    data, words = cast(x, sf_format="ue8m0")
    assert bits_of(words) == [0x0080697F]
    assert codes_of(data) == [0x7E] * 128 + [0] * 128 + [0x7E] * 128


def test_the_last_block_may_be_short() -> None:
    x = torch.cat([torch.full((1, 128), 448.0), torch.full((1, 64), 224.0)], dim=1)
    data, sf = cast(x)
    assert sf.tolist() == [[1.0, 0.5]]
    assert codes_of(data) == [0x7E] * 192


@pytest.mark.parametrize("round_sf", [0, 1])
def test_nan_elements_stay_nan_and_leave_the_scale_alone(round_sf: int) -> None:
    x = torch.full((1, 128), 224.0)
    x[0, 3], x[0, 7] = NAN, 448.0
    data, sf = cast(x, block=64, round_sf=round_sf)
    assert sf.tolist() == [[1.0, 0.5]]
    assert codes_of(data) == [0x76] * 3 + [0x7F] + [0x76] * 3 + [0x7E] + [0x76] * 56 + [0x7E] * 64


def test_a_block_of_nan_alone_has_the_scale_of_the_minimum() -> None:
    data, sf = cast(torch.full((1, 64), NAN), block=64)
    assert bits_of(sf) == [0x346FACAD]
    assert codes_of(data) == [0x7F] * 64


@pytest.mark.parametrize("round_sf", [0, 1])
def test_an_infinite_element_concerns_its_block_only(round_sf: int) -> None:
    x = torch.full((1, 128), 448.0)
    x[0, 5] = -INF
    data, sf = cast(x, block=64, round_sf=round_sf)
    assert sf.tolist() == [[INF, 1.0]]
    assert codes_of(data) == [0] * 5 + [0x7F] + [0] * 58 + [0x7E] * 64
    _, words = cast(x, block=64, sf_format="ue8m0")
    assert bits_of(words) == [0x00007FFF]


def test_bfloat16_and_float32_of_equal_values_agree() -> None:
    x = torch.randn(7, 192, generator=torch.Generator().manual_seed(1)).bfloat16()
    for ours, theirs in zip(cast(x), cast(x.float()), strict=True):
        assert torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8))


def test_row_strides_do_not_matter_and_inputs_are_not_modified() -> None:
    wide = torch.randn(7, 256, generator=torch.Generator().manual_seed(2))
    before = wide.clone()
    for ours, theirs in zip(cast(wide[:, :192]), cast(wide[:, :192].contiguous()), strict=True):
        assert torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8))
    assert torch.equal(wide, before)


@pytest.mark.parametrize(("sf_format", "shape"), [("f32", (0, 5)), ("ue8m0", (0, 2))])
@pytest.mark.parametrize("col_major", [False, True])
def test_no_rows(sf_format: str, shape: tuple[int, int], col_major: bool) -> None:
    data, sf = cast(torch.zeros(0, 576), sf_format=sf_format, col_major=col_major)
    assert (data.shape, data.dtype, sf.shape) == ((0, 576), torch.float8_e4m3fn, shape)
    assert sf.dtype == (torch.float32 if sf_format == "f32" else torch.int32)


# ---- layouts


def field_of(row: int, column: int) -> int:
    return 120 + (3 * row + 5 * column) % 13


def blocks_with_known_fields(rows: int, columns: int) -> torch.Tensor:
    fields = torch.tensor([[field_of(row, column) for column in range(columns)] for row in range(rows)])
    return torch.exp2(fields.float() - 127).mul(448).repeat_interleave(128, dim=1)


def test_packed_column_major_bytes() -> None:
    """16 blocks are 4 columns of words, and 5 rows need padding to 8."""
    _, sf = cast(blocks_with_known_fields(5, 16), sf_format="ue8m0", col_major=True)
    assert (sf.dtype, sf.shape, sf.stride()) == (torch.int32, (5, 4), (1, 8))
    stored = sf.as_strided((4 * 8,), (1,)).view(torch.uint8).view(4, 32)
    for row in range(5):
        for column in range(16):
            assert stored[column // 4, 4 * row + column % 4] == field_of(row, column)


def test_packed_row_major_bytes_and_zeros_behind_the_last_block() -> None:
    _, sf = cast(blocks_with_known_fields(5, 10), sf_format="ue8m0")
    assert (sf.shape, sf.stride()) == ((5, 3), (3, 1))
    stored = sf.view(torch.uint8)
    for row in range(5):
        assert stored[row].tolist() == [field_of(row, column) for column in range(10)] + [0, 0]


def test_float_column_major() -> None:
    x = blocks_with_known_fields(5, 3)
    _, sf = cast(x, col_major=True)
    assert (sf.shape, sf.stride()) == ((5, 3), (1, 8))
    stored = sf.as_strided((3, 8), (8, 1))
    for row in range(5):
        for column in range(3):
            assert stored[column, row] == 2.0 ** (field_of(row, column) - 127)


def test_row_major_is_the_same_values() -> None:
    x = blocks_with_known_fields(5, 16)
    for sf_format in ("f32", "ue8m0"):
        rows, columns = (cast(x, sf_format=sf_format, col_major=col_major)[1] for col_major in (False, True))
        assert rows.is_contiguous()
        assert torch.equal(rows, columns)


def test_packing_is_little_endian_and_reversible() -> None:
    words = rules.pack_ue8m0(torch.tensor([[1, 2, 3, 4, 255], [0, 127, 254, 9, 8]], dtype=torch.int32))
    assert bits_of(words) == [0x04030201, 0x000000FF, 0x09FE7F00, 0x00000008]
    assert rules.unpack_ue8m0(words).tolist() == [[1, 2, 3, 4, 255, 0, 0, 0], [0, 127, 254, 9, 8, 0, 0, 0]]


# ---- cast_back


def test_the_ends_of_the_ue8m0_range() -> None:
    values = rules.ue8m0_value(torch.tensor([0, 1, 127, 254, 255], dtype=torch.int32))
    assert bits_of(values)[:4] == [0x00400000, 0x00800000, 0x3F800000, 0x7F000000]
    assert values[4].isnan()


def test_cast_back_of_the_ends_of_the_ue8m0_range() -> None:
    data = e4m3([0x38] * 64 + [0x01] * 64 + [0x38] * 64 + [0x00] * 64).view(1, 256)
    sf = torch.tensor([[0 | 0 << 8 | 254 << 16 | 255 << 24]], dtype=torch.int64).to(torch.int32)
    back = quant.cast_back(data, sf, out_dtype="float32", bm=1, bk=64)
    assert bits_of(back[0, ::64]) == [0x00400000, 0x00002000, 0x7F000000, 0x7FFFFFFF]
    halves = quant.cast_back(data, sf, out_dtype="bfloat16", bm=1, bk=64)
    assert [word & 0xFFFF for word in halves[0, ::64].view(torch.int16).tolist()] == [0x0040, 0x0000, 0x7F00, 0x7FFF]


def test_cast_back_rounds_the_product_once_per_type() -> None:
    data = e4m3([0x3B, 0x7E, 0xBB] + [0] * 61).view(1, 64)  # 1.375, 448, -1.375
    sf = torch.tensor([[float_of(0x3F800001)]])
    back = quant.cast_back(data, sf, out_dtype="float32", bm=1, bk=64)
    assert bits_of(back[0, :3]) == [0x3FB00001, 0x43E00002, 0xBFB00001]


@pytest.mark.parametrize(
    ("code", "sf", "bits"), [(0x7F, 1.0, 0x7FFFFFFF), (0xFF, 1.0, 0x7FFFFFFF), (0x38, -INF, 0xFF800000), (0, INF, 0x7FFFFFFF)]
)
def test_nan_and_infinity_in_cast_back(code: int, sf: float, bits: int) -> None:
    back = quant.cast_back(e4m3([code] * 64).view(1, 64), torch.tensor([[sf]]), out_dtype="float32", bm=1, bk=64)
    assert bits_of(back) == [bits] * 64


@pytest.mark.parametrize(("bm", "bk"), [(1, 128), (1, 192), (128, 1), (128, 128), (32, 32), (3, 20)])
@pytest.mark.parametrize("packed", [False, True])
def test_cast_back_finds_the_scale_of_each_element(bm: int, bk: int, packed: bool) -> None:
    rows, columns = 5, 192
    blocks = (-(-rows // bm), -(-columns // bk))
    fields = torch.tensor([[field_of(i, j) for j in range(blocks[1])] for i in range(blocks[0])], dtype=torch.int32)
    sf = rules.pack_ue8m0(fields) if packed else torch.exp2(fields.float() - 127)
    data = e4m3([0x40] * rows * columns).view(rows, columns)  # 2
    back = quant.cast_back(data, rules.column_major(sf), out_dtype="bfloat16", bm=bm, bk=bk)
    assert (back.dtype, back.is_contiguous()) == (torch.bfloat16, True)
    for row in range(rows):
        assert back[row].tolist() == [2.0 ** (field_of(row // bm, column // bk) - 126) for column in range(columns)]


def test_cast_back_undoes_an_exact_cast() -> None:
    x = torch.tensor([[1.0, -1.5, 448.0, 0.0] * 16, [0.25, -28.0, 7.0, 3.5] * 16])
    for sf_format in ("f32", "ue8m0"):
        data, sf = cast(x, block=64, sf_format=sf_format)
        assert torch.equal(quant.cast_back(data, sf, out_dtype="float32", bm=1, bk=64), x)

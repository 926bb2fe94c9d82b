"""The references of the casts in blocks of rows and columns against bits computed by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tkbuild.reference import quant
from tkbuild.reference.quant import rules

NAN, INF = float("nan"), float("inf")


def cast(x: torch.Tensor, **changed: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return quant.per_block_cast(x, **arguments(**changed))


def arguments(**changed: Any) -> dict[str, Any]:
    given = {"fmt": "e4m3", "sf_format": "f32", "bm": 32, "bk": 32, "round_sf": 0, "amax_min": 1e-4, "col_major": False}
    return {**given, **changed}


def codes_of(data: torch.Tensor) -> list[list[int]]:
    return data.view(torch.uint8).tolist()


def bits_of(values: torch.Tensor) -> list[int]:
    return [word & 0xFFFFFFFF for word in values.contiguous().view(torch.int32).flatten().tolist()]


def words(fields: list[list[int]]) -> torch.Tensor:
    return rules.pack_ue8m0(torch.tensor(fields, dtype=torch.int32))


def powers(fields: list[list[int]]) -> torch.Tensor:
    return rules.power_of_two(torch.tensor(fields, dtype=torch.int32))


# ---- per_block_cast


def test_a_block_has_the_scale_of_its_largest_element() -> None:
    x = torch.zeros(33, 96)
    x[0, 0], x[31, 31], x[5, 32], x[32, 95] = 1.0, -448.0, 896.0, 2.0
    data, sf = cast(x)
    assert sf.tolist() == [[1.0, 2.0, pytest.approx(1e-4 / 448)], [pytest.approx(1e-4 / 448)] * 2 + [pytest.approx(2 / 448)]]
    codes = codes_of(data)
    assert (codes[0][0], codes[31][31], codes[5][32], codes[32][95]) == (0x38, 0xFE, 0x7E, 0x7E)


@pytest.mark.parametrize(("bm", "bk"), [(32, 32), (32, 128), (128, 32), (128, 128)])
def test_short_blocks_count_as_if_filled_up_with_zeros(bm: int, bk: int) -> None:
    x = torch.randn(131, 192)
    padded = torch.nn.functional.pad(x, (0, 64, 0, 125))
    data, sf = cast(x, bm=bm, bk=bk)
    wanted, wanted_sf = cast(padded, bm=bm, bk=bk)
    assert codes_of(data) == codes_of(wanted[:131, :192])
    assert sf.tolist() == wanted_sf[: -(-131 // bm), : -(-192 // bk)].tolist()


def test_blocks_of_one_row_are_those_of_per_token_cast() -> None:
    x = torch.randn(5, 128) * 100
    data, sf = cast(x, bm=1)
    wanted, wanted_sf = quant.per_token_cast(x, block=32, sf_format="f32", round_sf=0, amax_min=1e-4, col_major=False)
    assert codes_of(data) == codes_of(wanted)
    assert torch.equal(sf, wanted_sf)


def test_e2m1_divides_by_6_and_packs_the_even_column_low() -> None:
    x = torch.zeros(32, 32)
    x[0, :6] = torch.tensor([6.0, -0.5, 2.5, 3.5, 0.25, -6.0])  # ties go to even codes
    data, sf = cast(x, fmt="e2m1", amax_min=6 * 2.0**-126)
    assert sf.tolist() == [[1.0]]
    assert (data.dtype, data.shape) == (torch.int8, (32, 16))
    assert codes_of(data)[0][:3] == [0x97, 0x64, 0xF0]


@pytest.mark.parametrize(("amax", "field"), [(6.0, 127), (6.0000005, 128), (5.9999995, 127), (3.0, 126), (0.0, 1)])
def test_rounded_scale_of_e2m1(amax: float, field: int) -> None:
    _, sf = cast(torch.full((32, 32), amax), fmt="e2m1", round_sf=1, amax_min=6 * 2.0**-126)
    assert bits_of(sf) == [field << 23]


@pytest.mark.parametrize(("fmt", "nan", "zero"), [("e4m3", 0x7F, 0x00), ("e2m1", 0x77, 0x00)])
@pytest.mark.parametrize("round_sf", [0, 1])
def test_nan_and_infinity_stay_in_their_block(fmt: str, nan: int, zero: int, round_sf: int) -> None:
    x = torch.ones(64, 32)
    x[0, :2] = NAN
    x[40, :2] = -INF
    data, sf = cast(x, fmt=fmt, round_sf=round_sf)
    codes = codes_of(data)
    assert codes[0][0] == nan
    assert codes[40][0] == nan
    assert codes[41] == [zero] * len(codes[41])
    assert codes[1][0] != zero
    assert sf[1].item() == INF
    assert sf[0].item() == cast(torch.ones(32, 32), fmt=fmt, round_sf=round_sf)[1].item()


def test_an_infinite_block_has_byte_255() -> None:
    x = torch.ones(32, 32)
    x[3, 3] = INF
    assert bits_of(cast(x, sf_format="ue8m0")[1]) == [0x000000FF]


def test_zero_blocks_have_the_scale_of_the_clamp() -> None:
    data, sf = cast(torch.zeros(32, 64))
    assert bits_of(sf) == [0x346FACAD] * 2
    assert codes_of(data) == [[0] * 64] * 32


def test_packed_layouts() -> None:
    fields = [[120 + row + 2 * column for column in range(5)] for row in range(3)]
    x = (powers(fields) * 448).repeat_interleave(32, dim=0).repeat_interleave(32, dim=1)
    _, rows = cast(x, sf_format="ue8m0")
    assert (rows.shape, rows.stride()) == ((3, 2), (2, 1))
    assert rows.view(torch.uint8).tolist() == [[*row, 0, 0, 0] for row in fields]
    _, columns = cast(x, sf_format="ue8m0", col_major=True)
    assert (columns.shape, columns.stride()) == ((3, 2), (1, 4))
    assert torch.equal(rows, columns)


def test_scales_alone_and_no_rows() -> None:
    x = torch.randn(70, 192)
    for sf_format in ("f32", "ue8m0"):
        given = arguments(sf_format=sf_format, bm=128, bk=128, col_major=True)
        for fmt, largest in (("e4m3", 448.0), ("e2m1", 6.0)):
            _, wanted = quant.per_block_cast(x, **given | {"fmt": fmt})
            alone = {name: value for name, value in given.items() if name != "fmt"}
            assert torch.equal(quant.per_block_cast_with_sf_only(x, **alone, largest=largest), wanted)
    data, sf = cast(torch.empty(0, 64), col_major=True)
    assert (data.shape, sf.shape, sf.stride()) == ((0, 64), (0, 2), (1, 0))


# ---- per_block_cast_with_precomputed_sf


def test_given_powers_of_two_reproduce_the_data() -> None:
    x = torch.randn(70, 192)
    for fmt in ("e4m3", "e2m1"):
        data, sf = cast(x, fmt=fmt, round_sf=1)
        again = quant.per_block_cast_with_precomputed_sf(x, sf, fmt=fmt, bm=32, bk=32)
        assert codes_of(again) == codes_of(data)


def test_a_given_scale_is_inverted_first() -> None:
    """1 / 3 rounds up, so 3 * (1 / 3) is 1; 21 * (1 / 3) is 7.0000004 and still 7 in e4m3."""
    x = torch.zeros(32, 32)
    x[0, :4] = torch.tensor([3.0, 21.0, 1e30, NAN])
    data = quant.per_block_cast_with_precomputed_sf(x, torch.tensor([[3.0]]), fmt="e4m3", bm=32, bk=32)
    assert codes_of(data)[0][:4] == [0x38, 0x4E, 0x7E, 0x7F]


def test_given_scales_that_are_no_numbers_to_divide_by() -> None:
    x = torch.ones(32, 128)
    x[0, 0] = 0.0
    data = quant.per_block_cast_with_precomputed_sf(x, torch.tensor([[0.0, NAN, INF, -1.0]]), fmt="e4m3", bm=32, bk=32)
    codes = codes_of(data)
    assert codes[0][:2] == [0x7F, 0x7E]
    assert (codes[0][32], codes[0][64], codes[0][96]) == (0x7F, 0x00, 0xB8)


# ---- per_block_cast_lossless

ALL_CODES = [16 * (2 * i + 1) + 2 * i for i in range(8)] * 2  # 0 to 15, twice: 32 columns
VALUES = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0] * 2


def lossless(data: torch.Tensor, x_sf: torch.Tensor, **changed: Any) -> tuple[torch.Tensor, torch.Tensor]:
    given = {"sf_format": "f32", "xm": 1, "xk": 32, "bm": 1, "bk": 128, "col_major": False}
    return quant.per_block_cast_lossless(data, x_sf, **{**given, **changed})


def e2m1(rows: int, blocks: int) -> torch.Tensor:
    return torch.tensor([ALL_CODES * blocks] * rows, dtype=torch.uint8).view(torch.int8)


@pytest.mark.parametrize("packed", [False, True])
def test_values_stay_the_same(packed: bool) -> None:
    fields = [[130, 127, 120, 119], [10, 12, 14, 16]]
    data, sf = lossless(e2m1(2, 4), words(fields) if packed else powers(fields))
    assert bits_of(sf) == [124 << 23, 10 << 23]
    for row, scales in enumerate(fields):
        wanted = [value * 2.0 ** (field - 127) for field in scales for value in VALUES]
        assert (data[row].float() * sf[row]).tolist() == wanted


def test_the_largest_and_smallest_codes() -> None:
    """Fields 11 apart, the span that release 1.0 takes: 6 * 2**6 is 384, 0.5 * 2**-5 is the smallest normal number."""
    data, _ = lossless(e2m1(1, 2), powers([[127, 116]]), bk=64)
    codes = codes_of(data)[0]
    assert codes[:16] == [0x00, 0x60, 0x68, 0x6C, 0x70, 0x74, 0x78, 0x7C, 0x80, 0xE0, 0xE8, 0xEC, 0xF0, 0xF4, 0xF8, 0xFC]
    assert codes[32:48] == [0x00, 0x08, 0x10, 0x14, 0x18, 0x1C, 0x20, 0x24, 0x80, 0x88, 0x90, 0x94, 0x98, 0x9C, 0xA0, 0xA4]


@pytest.mark.parametrize(
    ("apart", "codes"),
    [
        (14, [0x00, 0x01, 0x02, 0x03, 0x04, 0x06, 0x08, 0x0C]),  # still exact
        (15, [0x00, 0x00, 0x01, 0x02, 0x02, 0x03, 0x04, 0x06]),  # ties go to even
        (18, [0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x01]),  # 6 * 2**-12 is three quarters of the smallest number
        (127, [0x00] * 8),
    ],
)
def test_scales_further_apart_are_rounded(apart: int, codes: list[int]) -> None:
    data, sf = lossless(e2m1(1, 2), words([[200, 200 - apart]]), bk=64)
    assert bits_of(sf) == [194 << 23]
    assert codes_of(data)[0][32:40] == codes


def test_small_scales_end_at_field_0() -> None:
    data, sf = lossless(e2m1(1, 2), words([[5, 6]]), bk=32)
    assert bits_of(sf) == [0, 0]
    assert codes_of(data)[0][2] == 0x38 + 8 * 5
    assert codes_of(data)[0][34] == 0x38 + 8 * 6
    _, packed = lossless(e2m1(1, 2), words([[5, 7]]), bk=32, sf_format="ue8m0")
    assert packed.view(torch.uint8).tolist() == [[0, 1, 0, 0]]


def test_only_the_exponent_of_a_scale_counts() -> None:
    x = e2m1(1, 4)
    data, sf = lossless(x, torch.tensor([[-1.75, 0.0, 1e-40, 1.0]]), bk=32)
    wanted, wanted_sf = lossless(x, powers([[127, 0, 0, 127]]), bk=32)
    assert codes_of(data) == codes_of(wanted)
    assert bits_of(sf) == bits_of(wanted_sf)


@pytest.mark.parametrize("scale", [INF, NAN])
def test_a_scale_without_a_number_goes_on(scale: float) -> None:
    _, sf = lossless(e2m1(1, 4), torch.tensor([[1.0, scale, 1.0, 1.0]]), bk=64)
    assert bits_of(sf) == [0x7F800000, 121 << 23]


@pytest.mark.parametrize(("bm", "bk"), [(1, 128), (32, 32), (128, 128)])
def test_new_blocks_take_the_largest_of_their_old_ones(bm: int, bk: int) -> None:
    rows, columns = 131, 160
    fields = torch.randint(120, 128, (rows, columns // 32), dtype=torch.int32)
    data, sf = lossless(e2m1(rows, columns // 32), rules.power_of_two(fields), bm=bm, bk=bk, col_major=True)
    for i in range(-(-rows // bm)):
        for j in range(-(-columns // bk)):
            block = fields[i * bm : (i + 1) * bm, j * bk // 32 : (j + 1) * bk // 32]
            assert sf[i, j] == 2.0 ** (int(block.max()) - 6 - 127)
    back = data.float() * rules.expand(sf, bm, bk, (rows, columns))
    assert torch.equal(
        back, torch.tensor(VALUES * (columns // 32)) * rules.expand(rules.power_of_two(fields), 1, 32, (rows, columns))
    )

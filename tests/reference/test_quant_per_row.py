"""The references of casts of whole rows, and of e5m6, against bits computed by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tkbuild.reference import quant
from tkbuild.reference.quant import per_row

NAN, INF = float("nan"), float("inf")


def bits_of(values: torch.Tensor) -> list[int]:
    return [word & 0xFFFFFFFF for word in values.contiguous().view(torch.int32).flatten().tolist()]


def code_of(value: float) -> int:
    return int(per_row.round_to_e5m6(torch.tensor([[value]])).item())


def cast(x: torch.Tensor, **changed: Any) -> tuple[torch.Tensor, torch.Tensor]:
    given = {"fmt": "e5m6", "sf_format": "f32", "col_major": False, "round_sf": 0, "amax_min": 1e-4}
    return quant.per_row_cast(x, **{**given, **changed})


@pytest.mark.parametrize(
    ("value", "code"),
    [
        (0.0, 0x000),
        (-0.0, 0x800),
        (1.0, 0x3C0),
        (-1.5, 0xBE0),
        (65024.0, 0x7BF),
        (2.0**-14, 0x040),  # the smallest normal number
        (2.0**-14 * 63 / 64, 0x03F),
        (2.0**-20, 0x001),
        (1 + 1 / 128, 0x3C0),  # between two codes: to even
        (1 + 3 / 128, 0x3C2),
        (1 + 1 / 128 + 2.0**-23, 0x3C1),
        (1 + 1 / 128 - 2.0**-23, 0x3C0),
        (2 - 2.0**-8, 0x400),  # rounds up to the next exponent
        (NAN, 0x7FF),
        (-NAN, 0x7FF),
    ],
)
def test_rounding_to_e5m6(value: float, code: int) -> None:
    assert code_of(value) == code


@pytest.mark.parametrize(
    ("value", "code"),
    [
        (2.0**-15 + 0.75 * 2.0**-20, 0x020),  # nearer to 0x021
        (2.0**-15 + 2.0**-15 * 0x1FFFF / 2**23, 0x021),  # nearer to 0x020
        (2.0**-60 * (1 + 0x1FFFF / 2**23), 0x001),  # far below half of the smallest number
        (-(2.0**-60) * (1 + 0x10001 / 2**23), 0x801),
        (2.0**-60 * (1 + 0x10000 / 2**23), 0x000),
        (2.0**-60, 0x000),
    ],
)
def test_numbers_below_the_normal_range_round_by_bits_that_do_not_fit(value: float, code: int) -> None:
    assert code_of(value) == code


def test_eight_codes_fill_three_words() -> None:
    x = torch.tensor([[1.0, -1.0, 65024.0, 0.0, 2.0**-14, 2.0**-20, 2.0**-14 * 63 / 64, 1.5]])
    data, sf = cast(x)
    assert (data.dtype, data.shape, sf.tolist()) == (torch.uint8, (1, 12), [[1.0]])
    # 3C0 BC0 7BF 000 040 001 03F 3E0
    assert bits_of(data) == [0x3C0BC07B, 0xF0000400, 0x0103F3E0]


def test_groups_of_eight_follow_one_another() -> None:
    x = torch.full((2, 24), 65024.0)
    x[:, 8:16] = 1.0
    data, _ = cast(x)
    ones, largest = [0x3C03C03C, 0x03C03C03, 0xC03C03C0], [0x7BF7BF7B, 0xF7BF7BF7, 0xBF7BF7BF]
    assert bits_of(data) == 2 * (largest + ones + largest)


@pytest.mark.parametrize(("amax", "sf", "field"), [(65024.0, 1.0, 127), (130048.0, 2.0, 128), (65025.0, 65025 / 65024, 128)])
def test_scales_of_e5m6(amax: float, sf: float, field: int) -> None:
    x = torch.tensor([[amax] + [0.0] * 7])
    assert torch.equal(cast(x)[1], torch.tensor([[sf]]))
    assert bits_of(cast(x, round_sf=1)[1]) == [field << 23]
    assert bits_of(cast(x, sf_format="ue8m0")[1]) == [field]


@pytest.mark.parametrize(("fmt", "largest", "codes"), [("e4m3", 448.0, [0x7E, 0xF6]), ("e2m1", 6.0, [0xD7])])
def test_a_row_has_one_scale(fmt: str, largest: float, codes: list[int]) -> None:
    x = torch.zeros(2, 64)
    x[:, 0], x[:, 1] = largest, -largest / 2
    x[1] *= 4
    data, sf = cast(x, fmt=fmt)
    assert sf.tolist() == [[1.0], [4.0]]
    assert data.view(torch.uint8)[:, : len(codes)].tolist() == [codes, codes]


@pytest.mark.parametrize("round_sf", [0, 1])
def test_an_infinite_element_concerns_its_row_only(round_sf: int) -> None:
    x = torch.ones(2, 8)
    x[0, 0] = INF
    x[1, 0] = NAN
    data, sf = cast(x, round_sf=round_sf)
    assert sf[0].item() == INF
    assert bits_of(data[0]) == [0x7FF00000, 0, 0]
    assert bits_of(data[1])[0] >> 20 == 0x7FF


def test_column_major_scales_and_no_rows() -> None:
    _, sf = cast(torch.ones(5, 64), col_major=True)
    assert (sf.shape, sf.stride()) == ((5, 1), (1, 8))
    data, sf = cast(torch.ones(0, 64), sf_format="ue8m0")
    assert (data.shape, sf.shape, sf.dtype) == ((0, 96), (0, 1), torch.int32)

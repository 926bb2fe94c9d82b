"""The references of the casts of columns in blocks of rows against bits computed by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tkbuild.reference import quant
from tkbuild.reference.quant import rules

NAN, INF = float("nan"), float("inf")


def cast(x: torch.Tensor, pos_to_token: torch.Tensor | None = None, **changed: Any) -> tuple[torch.Tensor, torch.Tensor]:
    rows = len(x) if pos_to_token is None else len(pos_to_token)
    given = {"sf_format": "f32", "rows": rows, "block": 32, "round_sf": 0, "amax_min": 1e-4}
    return quant.per_channel_cast(x, pos_to_token, **{**given, **changed})


def quantised(x: torch.Tensor, x_sf: torch.Tensor, **changed: Any) -> tuple[torch.Tensor, torch.Tensor]:
    given = {"sf_format": "f32", "rows": len(x), "block": 32, "round_sf": 0, "amax_min": 1e-4}
    return quant.per_channel_cast_quantised(x, x_sf, **{"x_block": 32, **given, **changed})


def codes_of(data: torch.Tensor) -> list[list[int]]:
    return data.view(torch.uint8).tolist()


def e4m3(codes: list[list[int]]) -> torch.Tensor:
    return torch.tensor(codes, dtype=torch.uint8).view(torch.float8_e4m3fn)


def test_each_column_has_a_scale_for_each_block_of_rows() -> None:
    x = torch.zeros(33, 2)
    x[0], x[31], x[32] = torch.tensor([1.0, -2.0]), torch.tensor([-448.0, 1.0]), torch.tensor([896.0, 7.0])
    data, sf = cast(x)
    assert sf.tolist() == [[1.0, pytest.approx(2 / 448)], [2.0, pytest.approx(7 / 448)]]
    codes = codes_of(data)
    assert (codes[0], codes[31], codes[32]) == ([0x38, 0xFE], [0xFE, 0x76], [0x7E, 0x7E])


def test_is_the_cast_of_rows_of_the_transpose() -> None:
    x = torch.randn(96, 7) * 50
    for sf_format in ("f32", "ue8m0"):
        data, sf = cast(x, sf_format=sf_format)
        wanted, wanted_sf = quant.per_token_cast(
            x.T.contiguous(), block=32, sf_format=sf_format, round_sf=0, amax_min=1e-4, col_major=False
        )
        assert codes_of(data) == codes_of(wanted.T)
        assert torch.equal(sf, wanted_sf.T)


def test_packed_bytes_of_blocks_one_under_the_other() -> None:
    fields = torch.tensor([[110 + row + 10 * column for column in range(3)] for row in range(5)], dtype=torch.int32)
    x = (rules.power_of_two(fields) * 448).repeat_interleave(32, dim=0)
    _, sf = cast(x, sf_format="ue8m0")
    assert (sf.dtype, sf.shape, sf.stride()) == (torch.int32, (2, 3), (3, 1))
    stored = sf.view(torch.uint8).view(2, 3, 4)
    for row in range(8):
        for column in range(3):
            assert stored[row // 4, column, row % 4] == (110 + row + 10 * column if row < 5 else 0)


def test_nan_and_infinity_stay_in_their_block() -> None:
    x = torch.ones(64, 2)
    x[0, 0], x[40, 1] = NAN, -INF
    data, sf = cast(x)
    codes = codes_of(data)
    assert (codes[0], codes[1]) == ([0x7F, 0x7E], [0x7E, 0x7E])
    assert (codes[40], codes[41]) == ([0x7E, 0x7F], [0x7E, 0x00])
    assert sf[1, 1] == INF
    assert sf[0].tolist() == [pytest.approx(1 / 448)] * 2


def test_gathered_rows() -> None:
    x = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    data, sf = cast(x, torch.tensor([1, -1, 0, 1, 2, -7], dtype=torch.int32), amax_min=448.0)
    assert data.float().tolist() == [[3.0, 4.0], [0.0, 0.0], [1.0, 2.0], [3.0, 4.0], [0.0, 0.0], [0.0, 0.0]]
    assert sf.tolist() == [[1.0, 1.0]]


def test_rows_behind_the_last_one_are_zero() -> None:
    data, _ = cast(torch.ones(2, 2), rows=3, amax_min=448.0)
    assert data.float().tolist() == [[1.0, 1.0], [1.0, 1.0], [0.0, 0.0]]


def test_no_rows() -> None:
    data, sf = cast(torch.empty(0, 64), sf_format="ue8m0")
    assert (data.shape, sf.shape) == ((0, 64), (0, 64))
    data, sf = cast(torch.empty(0, 64), torch.tensor([-1], dtype=torch.int32))
    assert (codes_of(data), sf.shape) == ([[0] * 64], (1, 64))


# ---- quantised input


@pytest.mark.parametrize(
    "x_sf",
    [
        torch.tensor([[2.0, 0.5], [4.0, 1.0]]),
        torch.tensor([[128 | 126 << 8], [129 | 127 << 8]], dtype=torch.int32),
        torch.tensor([[2.0, 0.5], [4.0, 1.0]]).to(torch.float8_e4m3fn),
    ],
)
def test_scales_of_pieces_of_rows(x_sf: torch.Tensor) -> None:
    x = e4m3([[0x38] * 64, [0x40] * 64])  # 1 and 2
    data, sf = quantised(x, x_sf, round_sf=1)
    assert sf[0].tolist() == [2.0**-5] * 32 + [2.0**-7] * 32
    assert (data.float() * sf).tolist() == [[2.0] * 32 + [0.5] * 32, [8.0] * 32 + [2.0] * 32]


def test_the_product_is_rounded_before_it_is_scaled() -> None:
    """1.875 * 1.0000001 is 1.8750002 in float32; scaled by 448 / 1.8750002 it is 448, and the scale shows the rounding."""
    data, sf = quantised(e4m3([[0x3F]]), torch.tensor([[1.0 + 2.0**-23]]))
    product = torch.tensor(1.875 + 2.0**-22)
    assert sf.item() == (product / torch.tensor(448.0)).item()
    assert codes_of(data) == [[0x7E]]


def test_nan_among_codes_and_scales() -> None:
    x = e4m3([[0x7F, 0x38, 0xFF], [0x38, 0x38, 0x38]])
    data, sf = quantised(x, torch.tensor([[255], [127]], dtype=torch.int32))
    assert codes_of(data) == [[0x7F] * 3, [0x7E] * 3]
    data, _ = quantised(x, torch.tensor([[1.0], [1.0]]))
    assert codes_of(data) == [[0x7F, 0x7E, 0x7F], [0x7E] * 3]
    assert sf.tolist() == [[pytest.approx(1 / 448)] * 3]


# ---- transposed


@pytest.mark.parametrize("round_sf", [0, 1])
def test_transposed_data_are_the_same(round_sf: int) -> None:
    x = torch.randn(64, 5)
    data, sf = quant.per_channel_cast_and_transpose(x.bfloat16(), block=32, round_sf=round_sf, amax_min=1e-4)
    wanted, wanted_sf = cast(x.bfloat16(), round_sf=round_sf)
    assert data.is_contiguous()
    assert codes_of(data) == codes_of(wanted.T)
    assert torch.equal(sf, wanted_sf)

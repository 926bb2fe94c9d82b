"""The reference of the cast back from e2m1, e5m6 and every layout of scales, against values computed by hand."""

from __future__ import annotations

import struct

import pytest
import torch

from tkbuild.errors import ArgumentError
from tkbuild.ops import quant as ops
from tkbuild.ops import v1
from tkbuild.reference import quant

E2M1_VALUES = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def e2m1_rows(*rows: list[int]) -> torch.Tensor:
    """Rows of bytes, each of two codes: the low half is the even column."""
    return torch.tensor(rows, dtype=torch.uint8).view(torch.int8)


def e5m6_row(*words: int) -> torch.Tensor:
    return torch.frombuffer(bytearray(struct.pack(f"<{len(words)}I", *words)), dtype=torch.uint8).view(1, -1)


def back(data: torch.Tensor, sf: torch.Tensor, bm: int = 1, bk: int = 64, **changed: int) -> torch.Tensor:
    return quant.cast_back(data, sf, out_dtype="float32", bm=bm, bk=bk, **changed)


def test_e2m1_codes_and_the_order_of_the_halves() -> None:
    bytes_ = [0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE] + [0x00] * 24
    values = back(e2m1_rows(bytes_), torch.ones(1, 1))
    assert values[0, :8].tolist() == E2M1_VALUES
    assert values[0, 8:16].tolist() == [-value for value in E2M1_VALUES]
    assert values[0, 8].signbit()


def test_e2m1_with_a_scale_for_each_block() -> None:
    data = e2m1_rows([0x22] * 32, [0xF2] * 32)
    values = back(data, torch.tensor([[1.0, 2.0], [4.0, 0.5]]), bk=32)
    assert values.tolist() == [[1.0] * 32 + [2.0] * 32, [4.0, -24.0] * 16 + [0.5, -3.0] * 16]


def test_a_zero_of_e2m1_times_infinity_is_nan() -> None:
    values = back(e2m1_rows([0x20] * 32), torch.tensor([[float("inf")]]))
    assert values.view(torch.int32)[0, 0] == 0x7FFFFFFF
    assert values[0, 1] == float("inf")


def test_e5m6_codes_lie_most_significant_first_in_little_endian_words() -> None:
    # 12-bit codes 3C0 (1), 801 (-2**-20), 000, 7BF (65024), 020, 040 (2**-14), C00 (-2), 001 (2**-20)
    words = (0x3C080100, 0x07BF0200, 0x40C00001)
    values = back(e5m6_row(*words), torch.ones(1, 1), bk=8)
    assert values.tolist() == [[1.0, -(2.0**-20), 0.0, 65024.0, 2.0**-15, 2.0**-14, -2.0, 2.0**-20]]


def test_e5m6_infinity_and_nan_are_those_of_float16() -> None:
    values = back(e5m6_row(0x7C0FC07F, 0xF0000000, 0), torch.ones(1, 1), bk=8)
    assert values[0, :2].tolist() == [float("inf"), float("-inf")]
    assert values[0, 2].isnan()
    assert values.view(torch.int32)[0, 2] == 0x7FFFFFFF


def test_e5m6_groups_of_a_row_and_their_scales() -> None:
    ones = (0x3C03C03C, 0x03C03C03, 0xC03C03C0)
    values = back(torch.cat([e5m6_row(*ones * 2), e5m6_row(*ones * 2)]), torch.tensor([[1.0, 2.0], [3.0, 4.0]]), bk=8)
    assert values.tolist() == [[1.0] * 8 + [2.0] * 8, [3.0] * 8 + [4.0] * 8]


def test_e4m3_scales() -> None:
    sf = torch.tensor([[0x38, 0x01, 0x7F, 0xC0]], dtype=torch.uint8).view(torch.float8_e4m3fn)  # 1, 2**-9, NaN, -2
    values = back(torch.full((1, 64), 1.5).to(torch.float8_e4m3fn), sf, bk=16)
    assert values[0, ::16].tolist()[:2] == [1.5, 1.5 * 2.0**-9]
    assert values[0, 32].isnan()
    assert values[0, 48] == -3.0


def test_token_packed_words_hold_four_block_rows() -> None:
    fields = torch.tensor([[120 + row + 2 * (column % 3) for column in range(64)] for row in range(5)])
    padded = torch.cat((fields, torch.zeros(3, 64, dtype=torch.int64))).view(2, 4, 64)
    words = (padded[:, 0] | padded[:, 1] << 8 | padded[:, 2] << 16 | padded[:, 3] << 24).to(torch.int32)
    data = torch.ones(9, 64).to(torch.float8_e4m3fn)
    values = back(data, words, bm=2, bk=1, token_packed=1)
    assert torch.equal(values, torch.exp2(fields.float() - 127).repeat_interleave(2, dim=0)[:9])
    assert torch.equal(back(data, words.T.contiguous().T, bm=2, bk=1, token_packed=1), values)


@pytest.mark.parametrize(("dtype", "width"), [(torch.int8, 64), (torch.uint8, 96), (torch.float8_e4m3fn, 64)])
def test_no_rows(dtype: torch.dtype, width: int) -> None:
    hidden = {torch.int8: 128, torch.uint8: 64}.get(dtype, 64)
    assert back(torch.zeros(0, width, dtype=torch.uint8).view(dtype), torch.zeros(0, 2), bk=hidden // 2).shape == (0, hidden)


# ---- unpack_from_e2m1fn_x2


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8])
@pytest.mark.parametrize("unpack", [ops.unpack_from_e2m1fn_x2, v1.quant.unpack_from_e2m1fn_x2])
def test_unpack_e2m1(dtype: torch.dtype, unpack) -> None:
    x = torch.tensor([[0x10, 0xF2], [0x97, 0x80]], dtype=torch.uint8).view(dtype)
    values = unpack(x)
    assert values.dtype == torch.float32
    assert values.tolist() == [[0.0, 0.5, 1.0, -6.0], [6.0, -0.5, 0.0, -0.0]]
    assert values[1, 3].signbit()
    assert unpack(x[None], torch.bfloat16).shape == (1, 2, 4)
    assert unpack(x, torch.bfloat16).tolist() == values.tolist()


def test_unpack_e2m1_of_nothing_and_of_what_it_cannot_read() -> None:
    assert ops.unpack_from_e2m1fn_x2(torch.zeros(3, 0, dtype=torch.int8)).shape == (3, 0)
    with pytest.raises(ArgumentError, match="no dimensions"):
        ops.unpack_from_e2m1fn_x2(torch.tensor(1, dtype=torch.int8))
    with pytest.raises(ArgumentError, match="float32, expected int8"):
        ops.unpack_from_e2m1fn_x2(torch.zeros(4))

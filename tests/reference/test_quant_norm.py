"""The references of RMSNorm against values computed by hand."""

from __future__ import annotations

import struct
from typing import Any

import pytest
import torch

from tkbuild.reference import quant
from tkbuild.reference.quant import rules

NAN, INF = float("nan"), float("inf")


def bits_of(values: torch.Tensor) -> list[int]:
    return [word & 0xFFFFFFFF for word in values.float().contiguous().view(torch.int32).flatten().tolist()]


def bits(value: float) -> int:
    return int(struct.unpack("<I", struct.pack("<f", value))[0])


def codes_of(data: torch.Tensor) -> list[int]:
    return [int(code) for code in data.view(torch.uint8).flatten().tolist()]


def row(*values: float, columns: int = 64, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.nn.functional.pad(torch.tensor([[values]]), (0, columns - len(values))).to(dtype)


def forward(x: torch.Tensor, weight: torch.Tensor | None = None, **changed: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """(y, rstd) of ``x`` (B, T, H)."""
    given: dict[str, Any] = {"residual": None, "residual_out": None, "eps": 0.0, "out_scale": 1.0, **changed}
    tensors = [given.pop(name) for name in ("residual", "residual_out")]
    *_, rstd, y = quant.norm_forward(x, weight, *tensors, torch.empty(x.shape[:2]), **given)
    return y, rstd


def fused(x: torch.Tensor, weight: torch.Tensor | None = None, mega_moe_sf: torch.Tensor | None = None, **changed: Any) -> Any:
    """What the reference returns: mega_moe_sf if given, data, sf."""
    given: dict[str, Any] = {"sf_format": "f32", "col_major": False, "eps": 0.0, "out_scale": 1.0, "round_sf": 0}
    given |= {"amax_min": 1e-4, "mega_moe_block_m": 0, **changed}
    return quant.norm_forward_and_per_token_cast(x, weight, None, None, None, None, mega_moe_sf, **given)


def random(*shape: int, seed: int = 1, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


# ---- forward


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equal_elements_become_the_weight(dtype: torch.dtype) -> None:
    y, rstd = forward(row(*[3.0] * 64, dtype=dtype), torch.full((64,), 2.0, dtype=dtype), out_scale=0.5)
    assert bits_of(rstd) == [0x3EAAAAAB]
    assert y.dtype == dtype
    assert y.tolist() == [[[1.0] * 64]]


def test_one_element_of_a_row() -> None:
    y, rstd = forward(row(1.0))
    assert rstd.tolist() == [[8.0]]
    assert y[0, 0, :2].tolist() == [8.0, 0.0]


def test_eps_is_added_in_float32_to_the_mean() -> None:
    y, rstd = forward(torch.zeros(1, 1, 64), eps=1e-6)
    assert rstd.tolist() == [[1000.0]]
    assert bits_of(y) == [0] * 64
    _, rstd = forward(row(8.0), eps=3.0)
    assert rstd.tolist() == [[0.5]]


def test_a_zero_row_without_eps_is_nan() -> None:
    y, rstd = forward(torch.zeros(1, 1, 16))
    assert rstd.tolist() == [[INF]]
    assert bits_of(y) == [0x7FFFFFFF] * 16


def test_products_are_grouped_as_stated() -> None:
    """(z * rstd) * (w * out_scale) with 3, RN(1 / 7), 0.3 and 1.1: from left to right it would end in A9, from the right in A7."""
    y, rstd = forward(row(3.0, columns=16), torch.full((16,), 0.3), eps=49 - 9 / 16, out_scale=1.1)
    assert bits_of(rstd) == [0x3E124925]
    assert bits_of(y)[0] == 0x3E10D2A8


def test_the_result_is_rounded_to_bfloat16_once() -> None:
    """1.00390625 lies between 1 and 1.0078125, 1.01171875 between 1.0078125 and 1.015625: both go to the even one."""
    weight = torch.tensor([1.0, 1.0078125] * 32, dtype=torch.bfloat16)
    y, _ = forward(row(*[1.0] * 64, dtype=torch.bfloat16), weight, out_scale=1.00390625)
    assert y[0, 0, :2].tolist() == [1.0, 1.015625]


@pytest.mark.parametrize(("first", "last", "mean"), [(4096.0, 1.0, 2.0**20), (1.0, 4096.0, 2.0**20 + 0.5)])
def test_a_lane_adds_its_elements_one_after_another(first: float, last: float, mean: float) -> None:
    """2**24 swallows every 1 behind it; 7 ones before it round 2**24 + 7 to 2**24 + 8."""
    _, rstd = forward(row(first, *[1.0] * 6, last, columns=16, dtype=torch.bfloat16))
    assert bits_of(rstd) == [bits(mean**-0.5)]


@pytest.mark.parametrize(("dtype", "columns", "step"), [(torch.float32, 1024, 128), (torch.bfloat16, 2048, 256)])
def test_a_lane_adds_its_vectors_one_after_another(dtype: torch.dtype, columns: int, step: int) -> None:
    """2**24 swallows the ones of two further vectors of a lane, but not the 2 of the same places of the next lane."""
    x = torch.zeros(1, 1, columns, dtype=dtype)
    lane, other = [0, step, 2 * step], [8, 8 + step]
    x[0, 0, lane], x[0, 0, other] = torch.tensor([4096.0, 1.0, 1.0], dtype=dtype), torch.ones(2, dtype=dtype)
    _, rstd = forward(x)
    assert bits_of(rstd) == [bits(((2.0**24 + 2) / columns) ** -0.5)]


def sum_of_ones_and_4096(columns: int, ones: list[int]) -> float:
    """The sum of squares of a row of float32 with 4096 at its start, from rstd."""
    x = torch.zeros(1, 1, columns)
    x[0, 0, 0], x[0, 0, ones] = 4096.0, 1.0
    _, rstd = forward(x)
    sums = [2.0**24 + extra for extra in range(0, 8, 2) if bits_of(rstd) == [bits(((2.0**24 + extra) / columns) ** -0.5)]]
    return sums[0] - 2.0**24


def test_neighbouring_lanes_are_added_first() -> None:
    """Of the lanes' 2**24, 1, 1, 1 the first 1 is lost, and the sum of the others is not."""
    assert sum_of_ones_and_4096(512, [4, 8, 12]) == 2


def test_neighbouring_warps_are_added_first() -> None:
    """The first vectors of warp w start at column 128 w."""
    assert sum_of_ones_and_4096(8192, [128, 256, 384]) == 2
    assert sum_of_ones_and_4096(8192, [128]) == 0


def test_the_residual_is_added_and_rounded_first() -> None:
    x = torch.ones(1, 1, 16, dtype=torch.bfloat16)
    residual = torch.tensor([[[2.0**-8, 3 * 2.0**-8] * 8]]).bfloat16()
    z, y = quant.norm_forward(x, None, residual, torch.empty_like(x), None, eps=0.0, out_scale=1.0)
    assert z[0, 0, :2].tolist() == [1.0, 1.015625]
    assert torch.equal(y, quant.norm_forward(z, None, None, None, None, eps=0.0, out_scale=1.0)[0])


def test_only_the_results_that_were_asked_for_come_back() -> None:
    x = random(2, 3, 32)
    assert len(quant.norm_forward(x, None, None, None, None, eps=0.0, out_scale=1.0)) == 1
    rstd, y = quant.norm_forward(x, None, x, None, torch.empty(2, 3), eps=0.0, out_scale=1.0)
    assert (rstd.shape, y.shape) == ((2, 3), (2, 3, 32))


@pytest.mark.parametrize("columns", [16, 576, 1040, 7168, 8192])
def test_close_to_float64(columns: int) -> None:
    x, weight = random(2, 5, columns), random(columns, seed=2)
    y, rstd = forward(x, weight, eps=1e-6, out_scale=0.3)
    wanted = 1 / (x.double().square().mean(-1) + 1e-6).sqrt()
    torch.testing.assert_close(rstd.double(), wanted, rtol=2e-6, atol=1e-7)
    torch.testing.assert_close(y.double(), x.double() * wanted[..., None] * weight * 0.3, rtol=2e-6, atol=1e-6)


def test_nan_and_infinity_concern_their_row_only() -> None:
    x = torch.ones(1, 3, 16)
    x[0, 0, 3], x[0, 1, 3] = NAN, -INF
    y, rstd = forward(x)
    assert bits_of(rstd) == [0x7FFFFFFF, 0, 0x3F800000]
    assert bits_of(y[0, 0]) == [0x7FFFFFFF] * 16
    assert bits_of(y[0, 1]) == [0] * 3 + [0x7FFFFFFF] + [0] * 12
    assert y[0, 2].tolist() == [1.0] * 16


def test_no_rows() -> None:
    y, rstd = forward(torch.zeros(2, 0, 64))
    assert (y.shape, rstd.shape) == ((2, 0, 64), (2, 0))


# ---- forward and cast


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("sf_format", "round_sf"), [("f32", 0), ("f32", 1), ("ue8m0", 1)])
def test_the_cast_is_that_of_the_rounded_rows(dtype: torch.dtype, sf_format: str, round_sf: int) -> None:
    x, weight = random(2, 5, 160, dtype=dtype), random(160, seed=2, dtype=dtype)
    data, sf = fused(x, weight, sf_format=sf_format, round_sf=round_sf, eps=1e-6)
    y, _ = forward(x, weight, eps=1e-6)
    wanted = rules.scales(rules.block_amax(y.flatten(0, 1).float(), 1, 32), 1e-4, rounded=bool(round_sf))
    codes = rules.round_to_e4m3(y.flatten(0, 1).float() * rules.expand(wanted[2], 1, 32, (10, 160)))
    assert codes_of(data) == codes_of(codes)
    assert torch.equal(sf.flatten(0, 1), rules.pack_ue8m0(wanted[0]) if sf_format == "ue8m0" else wanted[1])


def test_codes_and_scales_of_a_row() -> None:
    """rstd is 8 / 448: the first block becomes 8, the second 0; 8 / 448 is 2**-5.8, rounded up 2**-5."""
    x = row(448.0, columns=64)
    data, words = fused(x, sf_format="ue8m0", eps=0.0)
    assert codes_of(data) == [0x78] + [0] * 63  # 8 / 2**-5 = 256
    assert bits_of(words.view(torch.float32)) == [122 | 105 << 8]
    data, sf = fused(x)
    assert codes_of(data) == [0x7E] + [0] * 63
    assert sf[0, 0, 0].item() == torch.tensor(8.0).div(torch.tensor(448.0)).item()


def test_column_major_scales_are_padded_in_each_batch() -> None:
    x = random(3, 5, 160)
    for sf_format, columns in (("f32", 5), ("ue8m0", 2)):
        _, sf = fused(x, sf_format=sf_format, round_sf=1, col_major=True)
        assert (sf.shape, sf.stride()) == ((3, 5, columns), (columns * 8, 1, 8))
        assert torch.equal(sf, fused(x, sf_format=sf_format, round_sf=1)[1])


def test_bytes_behind_the_last_block_are_zero() -> None:
    _, words = fused(random(1, 5, 160), sf_format="ue8m0")
    assert ((words[0, :, 1] >> 8) == 0).all()


@pytest.mark.parametrize(
    ("token", "place"), [(0, 0), (1, 4), (31, 124), (32, 1), (127, 127), (128, 128), (160, 129), (191, 253), (192, 256), (299, 303)]
)
def test_place_of_a_token_in_the_second_copy(token: int, place: int) -> None:
    """Blocks of 192 rows fill two tiles of 128: token 299 is 107 in its block, which is 3 * 32 + 11."""
    x = random(1, 300, 256)
    second, _, words = fused(x, mega_moe_sf=torch.full((512, 2), -1, dtype=torch.int32), sf_format="ue8m0", mega_moe_block_m=192)
    assert torch.equal(second[place], words[0, token])
    assert int((second != -1).all(dim=1).sum()) == 300


def test_the_second_copy_is_packed_whatever_the_first_is() -> None:
    x = random(1, 7, 128)
    empty = torch.zeros(128, 1, dtype=torch.int32)
    second, _, sf = fused(x, mega_moe_sf=empty, round_sf=1, mega_moe_block_m=7)
    assert torch.equal(second[::4][:7, 0], rules.pack_ue8m0(rules.exponent_fields(sf[0]))[:, 0])


def test_a_nan_row_is_nan_with_the_scale_of_the_minimum() -> None:
    x = torch.ones(1, 2, 32)
    x[0, 0, 5] = NAN
    data, sf = fused(x)
    assert codes_of(data) == [0x7F] * 32 + [0x7E] * 32
    assert bits_of(sf)[0] == 0x346FACAD


def test_an_infinite_weight_concerns_its_block_only() -> None:
    weight = torch.ones(64)
    weight[3] = INF
    data, sf = fused(torch.ones(1, 1, 64), weight)
    assert codes_of(data) == [0] * 3 + [0x7F] + [0] * 28 + [0x7E] * 32
    assert sf[0, 0, 0].item() == INF


# ---- backward


def backward(out_grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor | None, rstd: torch.Tensor, **changed: Any) -> Any:
    given: dict[str, Any] = {"residual_out_grad": None, "weight_grad": None, "grad_dtype": "float32", "num_partials": 4}
    given |= {"out_scale": 1.0, "accumulate": 0, **changed}
    tensors = [given.pop(name) for name in ("residual_out_grad", "weight_grad")]
    return quant.norm_backward(out_grad, x, rstd, weight, *tensors, torch.empty(0), **given)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_backward_of_one_row(dtype: torch.dtype) -> None:
    x, out_grad = torch.ones(1, 32, dtype=dtype), row(32.0, columns=32, dtype=dtype)[0]
    (x_grad,) = backward(out_grad, x, None, torch.ones(1))
    assert x_grad.tolist() == [[31.0] + [-1.0] * 31]
    (x_grad,) = backward(out_grad, x, torch.full((32,), 2.0, dtype=dtype), torch.ones(1), out_scale=0.25)
    assert x_grad.tolist() == [[15.5] + [-0.5] * 31]
    (x_grad,) = backward(out_grad, x, None, torch.full((1,), 0.5))  # xh = 0.5, c = 0.5
    assert x_grad.tolist() == [[0.5 * 31.75] + [-0.125] * 31]


def test_backward_adds_the_residual_before_the_only_rounding() -> None:
    """(2 - 0.0625) + 2**-9 rounds to 1.9375 as bfloat16, in one step and in two; 1.9375 + 2**-8 + 2**-9 goes up."""
    x, out_grad = torch.ones(1, 32, dtype=torch.bfloat16), row(2.0, columns=32, dtype=torch.bfloat16)[0]
    residual = torch.zeros(1, 32, dtype=torch.bfloat16)
    residual[0, 0], residual[0, 1] = 2.0**-8 + 2.0**-9, 1.0
    (x_grad,) = backward(out_grad, x, None, torch.ones(1), residual_out_grad=residual)
    assert x_grad[0, :3].tolist() == [1.9375 + 2.0**-7, 0.9375, -0.0625]


def test_weight_grad_is_stored_or_accumulated_in_its_dtype() -> None:
    x, out_grad, weight = torch.ones(3, 32), torch.full((3, 32), 2.0), torch.ones(32)
    old = torch.full((32,), 256.0, dtype=torch.bfloat16)
    grad, _ = backward(out_grad, x, weight, torch.full((3,), 0.5), weight_grad=old, grad_dtype="bfloat16")
    assert (grad.dtype, grad.tolist()) == (torch.bfloat16, [3.0] * 32)
    grad, _ = backward(out_grad, x, weight, torch.full((3,), 0.5), weight_grad=old, grad_dtype="bfloat16", accumulate=1)
    assert grad.tolist() == [260.0] * 32  # 259 is between 258 and 260


@pytest.mark.parametrize("columns", [32, 1056, 7168])
def test_backward_against_autograd(columns: int) -> None:
    x, weight, out_grad = random(5, columns), random(columns, seed=2), random(5, columns, seed=3)
    x64, weight64 = x.double().requires_grad_(), weight.double().requires_grad_()
    rstd64 = (x64.square().mean(-1, keepdim=True) + 1e-6).rsqrt()
    (x64 * rstd64 * weight64 * 0.3).backward(out_grad.double())
    grad, x_grad = backward(out_grad, x, weight, rstd64.detach()[:, 0].float(), weight_grad=weight, out_scale=0.3)
    torch.testing.assert_close(x_grad.double(), x64.grad, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(grad.double(), weight64.grad, rtol=1e-5, atol=1e-6)


def test_backward_of_no_rows() -> None:
    empty = torch.zeros(0, 64)
    grad, x_grad = backward(empty, empty, torch.ones(64), torch.zeros(0), weight_grad=torch.ones(64))
    assert (x_grad.shape, grad.tolist()) == ((0, 64), [0.0] * 64)

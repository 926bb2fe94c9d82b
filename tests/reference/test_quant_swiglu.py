"""The SwiGLU references against bits computed by hand.

From a gate of 20 on, 1 + exp(-gate) is 1 and silu(gate) the gate, on every library; at 0 it is 0 and its slope 1/2.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from tkbuild.reference import quant
from tkbuild.reference.quant import swiglu

NAN, INF = float("nan"), float("inf")
E4M3, BF16, F32 = torch.float8_e4m3fn, torch.bfloat16, torch.float32
NO_LIMIT = -1.0


def float_of(bits: int) -> float:
    return float(struct.unpack("<f", struct.pack("<I", bits))[0])


def bits_of(values: torch.Tensor) -> list[int]:
    return [word & 0xFFFFFFFF for word in values.contiguous().view(torch.int32).flatten().tolist()]


def codes_of(data: torch.Tensor) -> list[int]:
    return [int(code) for code in data.contiguous().view(torch.uint8).flatten().tolist()]


def row(gate: Sequence[float], up: Sequence[float]) -> torch.Tensor:
    return torch.tensor([[*gate, *up]])


def forward(x: torch.Tensor, **changed: Any) -> tuple[torch.Tensor, ...]:
    rows, width = x.shape[0], x.shape[1] // 2
    given: dict[str, Any] = {
        **dict.fromkeys(("pos_to_token_topk", "topk_weights", "pos_to_expert", "psum", "clamped_count")),
        "out": torch.full((rows, width), 7.0),
        "alignment": 128,
        "routed_scaling_factor": 1.0,
        "clamp_value": NO_LIMIT,
    }
    return swiglu.swiglu_forward(x, **{**given, **changed})


def forward_cast(x: torch.Tensor, block: int = 128, **changed: Any) -> tuple[torch.Tensor, ...]:
    rows, width = x.shape[0], x.shape[1] // 2
    given: dict[str, Any] = {
        **dict.fromkeys(("pos_to_token_topk", "topk_weights", "pos_to_expert", "psum", "clamped_count")),
        "out": torch.full((rows, width), 7.0).to(E4M3),
        "sf": torch.full((rows, -(-width // block) if block else 1), 7.0),
        "alignment": 128,
        "routed_scaling_factor": 1.0,
        "clamp_value": NO_LIMIT,
        "round_sf": 0,
        "amax_min": 1e-4,
    }
    return quant.swiglu_forward_and_per_token_cast(x, block=block, **{**given, **changed})


def channels(x: torch.Tensor, **changed: Any) -> tuple[torch.Tensor, torch.Tensor]:
    given: dict[str, Any] = {"block": 32, "transposed": 1, "clamp_value": NO_LIMIT, "round_sf": 0, "amax_min": 1e-4}
    return quant.swiglu_forward_and_per_channel_cast_and_transpose(x, **{**given, **changed})


def backward(x: torch.Tensor, grad: torch.Tensor, **changed: Any) -> tuple[torch.Tensor, ...]:
    """(weight_grad and act if given, x_grad) in float32."""
    given: dict[str, Any] = {
        **dict.fromkeys(("topk_weights", "psum", "weight_grad", "act")),
        "out_dtype": "float32",
        "alignment": 128,
        "routed_scaling_factor": 1.0,
        "clamp_value": NO_LIMIT,
    }
    return quant.swiglu_backward(x, grad, **{**given, **changed})


# ---- forward: values


@pytest.mark.parametrize(
    ("gate", "bits"),
    [
        (32.0, 0x42000000),
        (0.0, 0x00000000),
        (-0.0, 0x80000000),
        (-200.0, 0x80000000),  # over infinity
        (1e-42, 0x00000165),  # subnormal: half of 0x2CA
        (3e38, 0x7F61B1E6),
        (INF, 0x7F800000),
        (-INF, 0x7FFFFFFF),
        (NAN, 0x7FFFFFFF),
    ],
)
def test_silu_at_its_ends(gate: float, bits: int) -> None:
    (out,) = forward(row([gate], [1.0]))
    assert bits_of(out) == [bits]


def test_silu_between_its_ends() -> None:
    gate = torch.linspace(-20, 20, 1001)
    (out,) = forward(torch.cat((gate, torch.ones(1001)))[None])
    wanted = gate.double() / (1 + torch.exp(-gate.double()))
    torch.testing.assert_close(out[0].double(), wanted, rtol=3e-7, atol=0)


def test_products_run_from_left_to_right() -> None:
    """21 * 1.2578125 is exact, its product with the weight is not; the other order ends one unit higher."""
    weight = torch.tensor([float_of(0x3F1E2FEC)])
    (out,) = forward(row([21.0], [1.2578125]), topk_weights=weight)
    assert bits_of(out) == [0x418292EE]


def test_weight_and_scaling_factor_are_multiplied_first() -> None:
    weight = torch.tensor([float_of(0x3FA4F4E3)])
    (out,) = forward(row([26.0], [1.0]), topk_weights=weight, routed_scaling_factor=2.5)
    assert bits_of(out) == [0x42A788B7]


def test_results_are_rounded_once_to_bfloat16() -> None:
    (out,) = forward(row([32.0, 32.0], [1 + 2.0**-8, 1 + 3 * 2.0**-8]), out=torch.zeros(1, 2, dtype=BF16))
    assert out.tolist() == [[32.0, 32.5]]


# ---- forward: limits and counts


def test_limits() -> None:
    gate, up = [32.0, 25.0, 32.0, 32.0, 24.0, 32.0], [1.0, 1.0, 30.0, -30.0, NAN, -25.0]
    (out,) = forward(row(gate, up), clamp_value=25.0)
    assert out[0, :4].tolist() == [25.0, 25.0, 625.0, -625.0]
    assert out[0, 4].isnan()
    assert out[0, 5] == -625.0


def test_a_limit_does_not_hold_a_gate_from_below_and_passes_nan() -> None:
    (out,) = forward(row([-200.0, NAN], [1.0, 1.0]), clamp_value=1.0)
    assert bits_of(out) == [0x80000000, 0x7FFFFFFF]


def test_a_limit_of_zero_keeps_the_sign_of_zeros() -> None:
    (out,) = forward(row([0.0, -0.0, 5.0, 0.0, 0.0, 0.0], [1.0, 1.0, -5.0, -5.0, -0.0, 5.0]), clamp_value=0.0)
    assert bits_of(out) == [0, 0x80000000, 0x80000000, 0x80000000, 0x80000000, 0]


@pytest.mark.parametrize("size", [3, 4])
def test_counts_are_strict_and_added(size: int) -> None:
    x = row([30.0, 25.0, NAN, INF], [25.0, 26.0, -26.0, -INF])
    _, counts = forward(x, clamp_value=25.0, clamped_count=torch.tensor([10, 20, 30, 40])[:size])
    assert counts.tolist() == [12, 21, 32, 44][:size]


def test_rows_that_are_left_out_are_not_counted() -> None:
    x = torch.full((3, 4), 9.0)
    _, counts = forward(x, clamp_value=1.0, pos_to_expert=torch.tensor([0, -1, 3]), clamped_count=torch.zeros(3, dtype=torch.int64))
    assert counts.tolist() == [4, 4, 0]


# ---- forward: rows and weights


def test_mapping_layout() -> None:
    x = torch.tensor([[32.0, 1.0]]).expand(5, 2)
    experts, index = torch.tensor([0, -1, 1, 1, 0]), torch.tensor([3, 2, 0, -1, 6])
    (out,) = forward(x, pos_to_expert=experts, pos_to_token_topk=index, topk_weights=torch.tensor([0.5, 2.0, 3.0, 4.0, 5.0, 6.0]))
    assert out.flatten().tolist() == [128.0, 7.0, 16.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("psum", "alignment", "kept"),
    [
        ([3, 4, 11], 4, [0, 1, 2, *range(4, 11)]),  # the second expert has no rows: it would begin at 4
        ([3, 5, 11], 4, [0, 1, 2, 4, *range(8, 11)]),
        ([0, 0, 2], 4, [0, 1]),
        ([3, 5], 1, [0, 1, 2, 3, 4]),
        ([12], 128, list(range(12))),
        ([0], 128, []),
    ],
)
def test_prefix_layout(psum: list[int], alignment: int, kept: list[int]) -> None:
    (out,) = forward(torch.full((12, 2), 32.0), psum=torch.tensor(psum, dtype=torch.int32), alignment=alignment)
    assert out.flatten().tolist() == [1024.0 if n in kept else 7.0 for n in range(12)]


# ---- forward: cast


def test_blocks_and_their_scales() -> None:
    x = torch.cat(
        [torch.full((1, 128), 32.0), torch.full((1, 64), 28.0), torch.full((1, 128), 14.0), torch.full((1, 64), 8.0)], dim=1
    )
    data, sf = forward_cast(x)
    assert sf.tolist() == [[1.0, 0.5]]
    assert codes_of(data) == [0x7E] * 192
    data, sf = forward_cast(x, block=0)
    assert sf.tolist() == [[1.0]]
    assert codes_of(data) == [0x7E] * 128 + [0x76] * 64
    _, sf = forward_cast(x, block=32, sf=torch.zeros(1, 2, dtype=torch.int32))
    assert bits_of(sf) == [0x7F7F7F7F, 0x00007E7E]


def test_rounded_scales_go_up() -> None:
    _, sf = forward_cast(row([32.0] * 32, [15.0] * 32), block=32, round_sf=1)
    assert sf.tolist() == [[2.0]]


def test_special_values_concern_their_block() -> None:
    x = row([NAN, INF, 32.0, 32.0] + [32.0] * 60, [14.0] * 64)
    data, sf = forward_cast(x, block=32)
    assert sf.tolist() == [[INF, 1.0]]
    assert codes_of(data)[:4] == [0x7F, 0x7F, 0, 0]
    assert codes_of(data)[32:] == [0x7E] * 32


def test_rows_that_are_left_out_keep_data_and_scale() -> None:
    data, sf = forward_cast(torch.full((2, 128), 32.0), block=64, pos_to_expert=torch.tensor([-1, 0]))
    assert sf.tolist() == [[7.0], [pytest.approx(1024 / 448)]]
    assert codes_of(data) == [0x4E] * 64 + [0x7E] * 64


# ---- channels


def test_channel_cast_rounds_to_bfloat16_first() -> None:
    """33 * 13.625 is 449.625, which becomes 450."""
    _, sf = channels(torch.tensor([[33.0, 13.625]]).expand(32, 2).bfloat16())
    assert bits_of(sf) == [0x3F809249]  # 450 / 448


def test_channel_layouts() -> None:
    gate = torch.full((64, 64), 32.0)
    up = torch.full((64, 64), 14.0)
    up[:32, 3], up[32:, 5] = 7.0, 28.0
    up[40, 5] = 14.0
    x = torch.cat((gate, up), dim=1).bfloat16()
    rows, sf = channels(x, transposed=0)
    columns, same_sf = channels(x, transposed=1)
    assert sf.shape == (2, 64)
    assert (sf[0, 3].item(), sf[1, 3].item(), sf[0, 5].item(), sf[1, 5].item()) == (0.5, 1.0, 1.0, 2.0)
    assert rows[40, 5].item() == 224.0
    assert torch.equal(rows.T.float(), columns.float())
    assert columns.is_contiguous()
    assert torch.equal(sf, same_sf)


def test_channel_limit_is_rounded_to_bfloat16() -> None:
    """20.06 becomes 20, in bfloat16 the neighbour of 20.125."""
    x = torch.tensor([[32.0, 1.0]]).expand(32, 2).bfloat16()
    _, sf = channels(x, clamp_value=20.06)
    assert sf.item() == torch.tensor(20.0).div(torch.tensor(448.0)).item()


# ---- a sum with one rounding


# ---- backward: values


def test_gradients_of_a_saturated_gate() -> None:
    """silu(32) = 32 with slope 1: the gate's gradient is that of the product with up, up's that with 32."""
    grad, weight = torch.tensor([[2.0, -4.0]]), torch.tensor([0.5])
    x = row([32.0, 64.0], [3.0, 5.0])
    given = {"topk_weights": weight, "weight_grad": torch.zeros(1), "act": torch.zeros(1, 2)}
    weight_grad, act, x_grad = backward(x, grad, routed_scaling_factor=4.0, **given)
    assert x_grad.tolist() == [[12.0, -40.0, 128.0, -512.0]]
    assert act.tolist() == [[192.0, 640.0]]
    assert weight_grad.tolist() == [4 * (2 * 96.0 - 4 * 320.0)]


def test_gradients_at_zero_and_at_the_ends() -> None:
    x = row([0.0, -200.0, -0.0], [3.0, 3.0, 3.0])
    act, x_grad = backward(x, torch.ones(1, 3), act=torch.zeros(1, 3))
    assert bits_of(act) == [0, 0x80000000, 0x80000000]
    assert x_grad.tolist() == [[1.5, -0.0, 1.5, 0.0, -0.0, -0.0]]


def test_gradients_are_those_of_autograd() -> None:
    x = torch.randn(5, 256, generator=torch.Generator().manual_seed(1), dtype=torch.float64).requires_grad_()
    grad = torch.randn(5, 128, generator=torch.Generator().manual_seed(2))
    gate, up = x.chunk(2, dim=1)
    (torch.nn.functional.silu(gate) * up).backward(grad.double())
    (x_grad,) = backward(x.detach().float(), grad)
    torch.testing.assert_close(x_grad, x.grad.float(), rtol=1e-5, atol=1e-6)


def test_where_a_limit_acts_the_gradient_is_zero() -> None:
    x = row([32.0, 24.0, 24.0, NAN], [3.0, 30.0, -30.0, 1.0])
    act, x_grad = backward(x, torch.ones(1, 4), clamp_value=25.0, act=torch.zeros(1, 4))
    assert act[0, :3].tolist() == [75.0, 600.0, -600.0]
    assert x_grad[0, :3].tolist() == [0.0, 25.0, -25.0]
    assert x_grad[0, 4:7].tolist() == [25.0, 0.0, 0.0]
    assert x_grad[0, [3, 7]].isnan().all()


# ---- backward: rows


def test_padding_is_cleared_and_rows_behind_it_are_real() -> None:
    """Experts own rows 0 to 2 and 4 to 4; rows 3 and 5 to 7 are padding, row 8 is behind."""
    psum = torch.tensor([3, 5], dtype=torch.int32)
    x, grad, weights = torch.full((9, 2), 32.0), torch.ones(9, 1), torch.ones(9)
    given = {"topk_weights": weights, "weight_grad": torch.full((9,), 7.0), "act": torch.full((9, 1), 7.0)}
    weight_grad, act, x_grad = backward(x, grad, psum=psum, alignment=4, **given)
    real = [1.0, 1.0, 1.0, 0.0, 1.0, 0.0, 0.0, 0.0, 1.0]
    assert weight_grad.tolist() == [1024 * r for r in real]
    assert act.flatten().tolist() == [1024 * r for r in real]
    assert x_grad[:, 0].tolist() == [32 * r for r in real]


def cast_backward(x: torch.Tensor, x_sf: torch.Tensor, grad: torch.Tensor, **changed: Any) -> tuple[torch.Tensor, ...]:
    given: dict[str, Any] = {
        **dict.fromkeys(("topk_weights", "psum", "weight_grad", "act")),
        "block": 32,
        "sf_format": "f32",
        "col_major": False,
        "alignment": 4,
        "routed_scaling_factor": 1.0,
        "clamp_value": NO_LIMIT,
        "round_sf": 0,
        "amax_min": 1e-4,
    }
    return quant.swiglu_backward_and_per_token_cast(x, x_sf, grad, **{**given, **changed})


def test_gradient_is_quantised_in_each_half_from_float32() -> None:
    """gate 16 * 2, up 7 * 2: gradients of 14 and 32 in blocks of their own."""
    x = torch.cat((torch.full((2, 64), 16.0), torch.full((2, 64), 7.0)), dim=1).to(E4M3)
    psum = torch.tensor([1], dtype=torch.int32)
    x_grad, data, sf = cast_backward(x, torch.full((2, 4), 2.0), torch.ones(2, 64), psum=psum)
    assert (x_grad.dtype, x_grad[0].tolist()) == (BF16, [14.0] * 64 + [32.0] * 64)
    assert bits_of(sf) == [0x3D000000, 0x3D000000, 0x3D924925, 0x3D924925, 0, 0, 0, 0]
    assert codes_of(data) == [0x7E] * 128 + [0] * 128


def test_packed_scales_of_a_gradient() -> None:
    x = torch.cat((torch.full((5, 192), 16.0), torch.full((5, 192), 7.0)), dim=1).to(E4M3)
    _, _, sf = cast_backward(x, torch.full((5, 12), 2.0), torch.ones(5, 192), sf_format="ue8m0", col_major=True)
    assert (sf.shape, sf.stride()) == ((5, 3), (1, 8))
    assert bits_of(sf[0]) == [0x7A7A7A7A, 0x7C7C7A7A, 0x7C7C7C7C]
    x, scales = torch.cat((x[:, :128], x[:, 256:]), dim=1), torch.full((5, 2), 2.0)
    _, _, sf = cast_backward(x, scales, torch.ones(5, 128), sf_format="ue8m0", block=128)
    assert bits_of(sf) == [0x00007C7A] * 5


def test_mapped_rows_and_slots() -> None:
    """Row 1 serves no slot; slot 2 names a row that serves another, slot 3 none."""
    x = torch.full((3, 64), 24.0).to(E4M3)
    index = torch.tensor([1, -1, 0], dtype=torch.int32)
    places = torch.tensor([[2, 0], [1, -1]], dtype=torch.int32)
    weight = torch.tensor([[2.0, 3.0], [5.0, 7.0]])
    given = (x, torch.ones(3, 2), torch.ones(3, 32, dtype=BF16), weight, index, places, torch.full((2, 2), 9.0))
    rules = {"block": 32, "clamp_value": 20.0, "round_sf": 0, "amax_min": 1e-4}
    weight_grad, act, data, sf, x_grad = quant.swiglu_backward_mapped(*given, **rules)
    assert weight_grad.tolist() == [[32 * 400.0, 32 * 400.0], [0.0, 0.0]]
    assert act[:, 0].tolist() == [1200.0, 0.0, 800.0]
    assert torch.equal(x_grad, torch.zeros(3, 64, dtype=BF16))
    assert bits_of(sf) == [0x346FACAD] * 6
    assert codes_of(data) == [0] * 192


def test_no_rows() -> None:
    assert forward(torch.zeros(0, 128))[0].shape == (0, 64)
    data, sf = forward_cast(torch.zeros(0, 128))
    assert (data.shape, sf.shape) == ((0, 64), (0, 1))
    assert channels(torch.zeros(0, 128, dtype=BF16))[0].shape == (64, 0)
    assert backward(torch.zeros(0, 128), torch.zeros(0, 64))[0].shape == (0, 128)
    assert cast_backward(torch.zeros(0, 128).to(E4M3), torch.zeros(0, 4), torch.zeros(0, 64))[2].shape == (0, 4)

"""The public SwiGLU functions on a GPU, against their references."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gpu_checks import opcheck, same

from tkbuild import ops
from tkbuild.errors import ArgumentError, NoVariantError
from tkbuild.ops import v1
from tkbuild.reference import quant as reference
from tkbuild.reference.quant.rules import canonical_nan
from tkbuild.runtime.launcher import native

pytestmark = pytest.mark.gpu

E4M3, BF16, F32 = torch.float8_e4m3fn, torch.bfloat16, torch.float32
NO_LIMIT = -1.0
CAST = ops.quant.swiglu_forward_and_per_token_cast
V1_CAST = v1.quant.swiglu_forward_and_per_token_cast
BACKWARD = ops.quant.swiglu_backward_and_per_token_cast


def random(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.randn(shape, device="cuda").to(dtype)


def ints(*values: Any, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype, device="cuda")


def quantised(rows: int, width: int, block: int) -> tuple[torch.Tensor, torch.Tensor]:
    return random(rows, width).to(E4M3), torch.rand(rows, width // block, device="cuda") + 0.5


def forward_reference(
    x: torch.Tensor, like: tuple[torch.Tensor, torch.Tensor], block: int, **given: Any
) -> tuple[torch.Tensor, ...]:
    """The reference on zeroed outputs that look like ``like``."""
    defaults: dict[str, Any] = {
        **dict.fromkeys(("pos_to_token_topk", "topk_weights", "pos_to_expert", "psum", "clamped_count")),
        "alignment": 128,
        "routed_scaling_factor": 1.0,
        "clamp_value": NO_LIMIT,
        "round_sf": 0,
        "amax_min": 1e-4,
    }
    blank = {"out": torch.zeros_like(like[0]), "sf": torch.zeros_like(like[1])}
    return reference.swiglu_forward_and_per_token_cast(x, block=block, **{**defaults, **blank, **given})


# ---- forward


@pytest.mark.parametrize("dtype", [BF16, F32])
@pytest.mark.parametrize("block", [32, 128])
@pytest.mark.parametrize(
    ("col_major", "round_sf", "packed"),
    [(False, False, False), (True, False, False), (False, True, False), (True, True, True), (False, True, True)],
)
def test_forward_cast_of_a_slice(dtype: torch.dtype, block: int, col_major: bool, round_sf: bool, packed: bool) -> None:
    x = random(33, 4096, dtype=dtype)[:, 512 : 512 + 2 * 1088]
    flags = {"use_tma_aligned_col_major_sf": col_major, "round_sf": round_sf, "use_packed_ue8m0": packed}
    data, sf = CAST(x, "e4m3", block, **flags)
    wanted, wanted_sf = forward_reference(x, (data, sf), block, round_sf=int(round_sf))
    assert same(data, wanted)
    assert same(sf, wanted_sf)
    assert sf.stride() == ((1, 36) if col_major else (sf.shape[1], 1))


def test_forward_in_the_prefix_layout() -> None:
    rows, width = 300, 576
    x, weights, counts = random(rows, 2 * width), random(rows, dtype=F32), ints(5, 6, 7, 8, dtype=torch.int64)
    psum = ints(3, 4, 130, 256)
    given = {"topk_weights": weights, "psum": psum, "routed_scaling_factor": 2.5, "clamp_value": 0.5}
    try:
        ops.set_token_alignment(4)
        data, sf = CAST(x, "e4m3", 128, psum, weights, 2.5, clamp_value=0.5, clamped_count=counts)
        plain = ops.quant.swiglu_forward(x, "fp32", psum, weights, 2.5, clamp_value=0.5)
    finally:
        ops.config.reset_runtime_config()
    wanted, wanted_sf, wanted_counts = forward_reference(
        x, (data, sf), 128, alignment=4, clamped_count=ints(5, 6, 7, 8, dtype=torch.int64), **given
    )
    real = torch.zeros(rows, dtype=torch.bool, device="cuda")
    for first, end in ((0, 3), (4, 4), (4, 130), (132, 256)):
        real[first:end] = True
    assert same(data[real], wanted[real])
    assert same(sf[real], wanted_sf[real])
    assert counts.tolist() == wanted_counts.tolist()
    nothing = dict.fromkeys(("pos_to_token_topk", "pos_to_expert", "clamped_count"))
    (values,) = reference.swiglu_forward(x, out=torch.zeros_like(plain), alignment=4, **nothing, **given)
    assert same(plain[real], values[real])


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("clamp", [None, 10.0, 0.5])
def test_forward_in_the_mapping_layout(whole: bool, clamp: float | None) -> None:
    rows, width = 300, 1024
    x, weights = random(rows, 2 * width), random(67, 8, dtype=F32)
    index = torch.randperm(67 * 8, device="cuda")[:rows].int()
    experts = torch.randint(-1, 4, (rows,), device="cuda").int()
    counts = None if clamp is None else torch.zeros(3, dtype=torch.int64, device="cuda")
    data, sf = V1_CAST(x, "e4m3", width if whole else 128, index, weights, experts, swiglu_clamp_value=clamp, clamped_count=counts)
    wanted, wanted_sf, *wanted_counts = forward_reference(
        x,
        (data, sf),
        0 if whole else 128,
        pos_to_token_topk=index,
        topk_weights=weights.flatten(),
        pos_to_expert=experts,
        clamp_value=NO_LIMIT if clamp is None else clamp,
        clamped_count=None if counts is None else torch.zeros_like(counts),
    )
    assert same(data[experts >= 0], wanted[experts >= 0])
    assert same(sf[experts >= 0], wanted_sf[experts >= 0])
    assert counts is None or counts.tolist() == wanted_counts[0].tolist()


def test_sf_clamp_min_is_the_least_abs_max() -> None:
    x = torch.zeros(3, 256, dtype=BF16, device="cuda")
    assert V1_CAST(x, "e4m3", 128, sf_clamp_min=448.0)[1].tolist() == [[1.0]] * 3
    assert V1_CAST(x, "e4m3", 128)[1].tolist() == [[pytest.approx(1e-4 / 448)]] * 3


def test_silu_of_every_float32() -> None:
    """The kernels divide in fewer steps than the library; every gate there is must give the same bits."""
    rows, width = 4096, 8192
    x = torch.ones(rows, 2 * width, device="cuda")
    for first in range(-(2**31), 2**31, rows * width):
        bits = torch.arange(first, first + rows * width, device="cuda").int()
        gate = bits.view(F32).view(rows, width)
        x[:, :width] = gate
        wanted = canonical_nan(gate / (torch.exp(-gate) + 1))
        assert same(ops.quant.swiglu_forward(x, "fp32"), wanted)


def test_silu_of_every_bfloat16_in_every_kernel() -> None:
    gate = torch.arange(-(2**15), 2**15, device="cuda").short().view(BF16).view(512, 128)
    x = torch.cat((gate, torch.ones_like(gate)), dim=1)
    data, sf = CAST(x, "e4m3", 32)
    wanted, wanted_sf = forward_reference(x, (data, sf), 32)
    assert same(data, wanted)
    assert same(sf, wanted_sf)
    rules = {"block": 32, "clamp_value": NO_LIMIT, "round_sf": 0, "amax_min": 1e-4}
    for transposed in (False, True):
        found = v1.quant.swiglu_forward_and_per_channel_cast_and_transpose(x, "e4m3", 32, without_transpose=not transposed)
        expected = reference.swiglu_forward_and_per_channel_cast_and_transpose(x, transposed=int(transposed), **rules)
        assert same(found[0], expected[0])
        assert same(found[1], expected[1])
    grad = torch.ones_like(gate)
    act = torch.empty_like(gate, dtype=F32)
    nothing = dict.fromkeys(("topk_weights", "psum", "weight_grad"))
    values = {"alignment": 128, "routed_scaling_factor": 1.0, "clamp_value": NO_LIMIT, "out_dtype": "float32"}
    x_grad, found_act = ops.quant.swiglu_backward(x, grad, "fp32", do_recompute=True)
    wanted_act, wanted_grad = reference.swiglu_backward(x, grad, act=act, **nothing, **values)
    assert same(found_act, wanted_act)
    assert same(x_grad, wanted_grad)


@pytest.mark.parametrize("block", [32, 128])
@pytest.mark.parametrize("without_transpose", [False, True])
@pytest.mark.parametrize("clamp", [None, 10.0, 0.3])
def test_channel_cast_of_a_slice(block: int, without_transpose: bool, clamp: float | None) -> None:
    x = random(384, 4096)[128:, 64 : 64 + 2 * 1088]
    data, sf = v1.quant.swiglu_forward_and_per_channel_cast_and_transpose(x, "e4m3", block, True, without_transpose, clamp)
    rules = {"clamp_value": NO_LIMIT if clamp is None else clamp, "round_sf": 1, "amax_min": 1e-4}
    wanted, wanted_sf = reference.swiglu_forward_and_per_channel_cast_and_transpose(
        x, block=block, transposed=int(not without_transpose), **rules
    )
    assert same(data, wanted)
    assert same(sf, wanted_sf)


# ---- backward


@pytest.mark.parametrize("grad_dtype", [BF16, F32])
@pytest.mark.parametrize("block", [32, 128])
@pytest.mark.parametrize(
    ("col_major", "round_sf", "packed"), [(False, False, False), (True, False, False), (True, True, True), (False, True, True)]
)
def test_backward_cast(grad_dtype: torch.dtype, block: int, col_major: bool, round_sf: bool, packed: bool) -> None:
    rows, width = 150, 384
    (x, x_sf), grad, weights, psum = (
        quantised(rows, 2 * width, block),
        random(rows, width, dtype=grad_dtype),
        random(rows, dtype=F32),
        ints(17, 130),
    )
    flags = {"use_tma_aligned_col_major_sf": col_major, "round_sf": round_sf, "use_packed_ue8m0": packed}
    x_grad, (data, sf), weight_grad, act = BACKWARD(
        (x, x_sf), grad, "e4m3", block, psum, weights, 2.5, **flags, clamp_value=1.0, do_recompute=True
    )
    wanted_weight_grad, *wanted = reference.swiglu_backward_and_per_token_cast(
        x, x_sf, grad, weights, psum, weight_grad, act, block=block, sf_format="ue8m0" if packed else "f32", col_major=col_major,
        alignment=128, routed_scaling_factor=2.5, clamp_value=1.0, round_sf=int(round_sf), amax_min=1e-4,
    )  # fmt: skip
    for found, expected in zip((act, x_grad, data, sf), wanted, strict=True):
        assert same(found, expected)
        assert found.stride() == expected.stride()
    torch.testing.assert_close(weight_grad, wanted_weight_grad, rtol=1e-4, atol=1e-4)
    assert not x_grad[17:128].any()


def test_backward_returns_what_is_asked_for() -> None:
    x, grad, weights = random(5, 256), random(5, 128), random(5, dtype=F32)
    assert [t.shape for t in ops.quant.swiglu_backward(x, grad, "bf16")] == [(5, 256)]
    assert [t.shape for t in ops.quant.swiglu_backward(x, grad, "bf16", topk_weights=weights)] == [(5, 256), (5,)]
    assert [t.dtype for t in ops.quant.swiglu_backward(x, grad, "fp32", do_recompute=True)] == [F32, F32]
    three = ops.quant.swiglu_backward(x[None], grad[None], "bf16", topk_weights=weights, do_recompute=True)
    assert [t.shape for t in three] == [(5, 256), (5,), (5, 128)]


def test_backward_is_that_of_autograd() -> None:
    x = random(7, 512, dtype=F32).requires_grad_()
    grad = random(7, 256, dtype=F32)
    gate, up = x.chunk(2, dim=1)
    (torch.nn.functional.silu(gate) * up).backward(grad)
    (x_grad,) = ops.quant.swiglu_backward(x.detach(), grad, "fp32")
    torch.testing.assert_close(x_grad, x.grad, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("block", [32, 128])
@pytest.mark.parametrize("clamp", [None, 0.5])
def test_backward_in_the_mapping_layout(block: int, clamp: float | None) -> None:
    rows, width = 300, 1152
    (x, x_sf), grad, weight = quantised(rows, 2 * width, block), random(rows, width), random(67, 8, dtype=F32)
    order = torch.randperm(67 * 8, device="cuda").int()
    index = torch.where(torch.rand(rows, device="cuda") < 0.2, -1, order[:rows]).int()
    places = torch.full((67 * 8,), -1, dtype=torch.int32, device="cuda")
    places[index[index >= 0].long()] = torch.arange(rows, device="cuda").int()[index >= 0]
    act, (data, sf), x_grad, weight_grad = v1.quant.swiglu_backward_and_per_token_cast(
        (x, x_sf), grad, weight, index, places.view(67, 8), block, True, clamp
    )
    rules = {"block": block, "clamp_value": NO_LIMIT if clamp is None else clamp, "round_sf": 1, "amax_min": 1e-4}
    wanted_weight_grad, *wanted = reference.swiglu_backward_mapped(
        x, x_sf, grad, weight, index, places.view(67, 8), weight_grad, **rules
    )
    for found, expected in zip((act, data, sf, x_grad), wanted, strict=True):
        assert same(found, expected)
    torch.testing.assert_close(weight_grad, wanted_weight_grad, rtol=1e-4, atol=1e-4)
    assert not weight_grad.flatten()[places < 0].any()


def test_weight_gradients_repeat_bit_for_bit() -> None:
    x, grad, weights = random(64, 14336), random(64, 7168), random(64, dtype=F32)
    first = ops.quant.swiglu_backward(x, grad, "bf16", topk_weights=weights)[1]
    assert all(same(first, ops.quant.swiglu_backward(x, grad, "bf16", topk_weights=weights)[1]) for _ in range(20))


# ---- edges of the contract


def test_no_rows_launch_nothing() -> None:
    before = native().launch_count()
    data, sf = CAST(random(0, 256), "e4m3", 128, ints(0, 0), use_tma_aligned_col_major_sf=True)
    assert (data.shape, sf.shape) == ((0, 128), (0, 1))
    assert V1_CAST(random(8, 256)[3:3], "e4m3", 128)[0].shape == (0, 128)
    assert ops.quant.swiglu_forward(random(0, 256), "bf16").shape == (0, 128)
    assert v1.quant.swiglu_forward_and_per_channel_cast_and_transpose(random(0, 256), "e4m3", 32)[0].shape == (128, 0)
    x_grad, (data, sf) = BACKWARD(quantised(0, 256, 32), random(0, 128), "e4m3", 32, use_tma_aligned_col_major_sf=True)
    assert (x_grad.shape, data.shape, sf.shape) == ((0, 256), (0, 256), (0, 8))
    *_, weight_grad = v1.quant.swiglu_backward_and_per_token_cast(
        quantised(0, 256, 32),
        random(0, 128),
        random(5, 2, dtype=F32),
        ints(),
        torch.full((5, 2), -1, dtype=torch.int32, device="cuda"),
        32,
    )
    assert native().launch_count() == before
    assert torch.equal(weight_grad, torch.zeros(5, 2, device="cuda"))


REFUSED = {
    "format": lambda: CAST(random(4, 256), "e2m1", 128),
    "block": lambda: CAST(random(4, 256), "e4m3", 64),
    "plain format": lambda: ops.quant.swiglu_forward(random(4, 256), "e4m3"),
    "width": lambda: CAST(random(4, 192), "e4m3", 32),
    "rank": lambda: CAST(random(1, 4, 256), "e4m3", 32),
    "column stride": lambda: CAST(random(256, 256).T, "e4m3", 32),
    "alignment": lambda: CAST(random(4, 264)[:, 1:257], "e4m3", 32),
    "dtype": lambda: CAST(random(4, 256).half(), "e4m3", 32),
    "device": lambda: CAST(random(4, 256).cpu(), "e4m3", 32),
    "packed without rounding": lambda: CAST(random(4, 256), "e4m3", 32, use_packed_ue8m0=True),
    "counts without limit": lambda: CAST(random(4, 256), "e4m3", 32, clamped_count=ints(0, 0, 0, 0, dtype=torch.int64)),
    "three counts": lambda: CAST(random(4, 256), "e4m3", 32, clamp_value=1.0, clamped_count=ints(0, 0, 0, dtype=torch.int64)),
    "counts of int32": lambda: CAST(random(4, 256), "e4m3", 32, clamp_value=1.0, clamped_count=ints(0, 0, 0, 0)),
    "scaling without weights": lambda: CAST(random(4, 256), "e4m3", 32, routed_scaling_factor=2.0),
    "too few weights": lambda: CAST(random(4, 256), "e4m3", 32, topk_weights=random(3, dtype=F32)),
    "weights of bfloat16": lambda: CAST(random(4, 256), "e4m3", 32, topk_weights=random(4)),
    "no experts": lambda: CAST(random(4, 256), "e4m3", 32, ints()),
    "psum of int64": lambda: CAST(random(4, 256), "e4m3", 32, ints(4, dtype=torch.int64)),
    "negative limit": lambda: CAST(random(4, 256), "e4m3", 32, clamp_value=-1.0),
    "NaN as limit": lambda: CAST(random(4, 256), "e4m3", 32, clamp_value=float("nan")),
    "1.0: block": lambda: V1_CAST(random(4, 512), "e4m3", 32),
    "1.0: width": lambda: V1_CAST(random(4, 384), "e4m3", 192),
    "1.0: index alone": lambda: V1_CAST(random(4, 256), "e4m3", 128, ints(0, 1, 2, 3)),
    "1.0: short index": lambda: V1_CAST(random(4, 256), "e4m3", 128, ints(0, 1), random(4, 1, dtype=F32)),
    "1.0: short experts": lambda: V1_CAST(random(4, 256), "e4m3", 128, pos_to_expert=ints(0, 1)),
    "1.0: column-major whole rows": lambda: V1_CAST(random(4, 512), "e4m3", 256, use_tma_aligned_col_major_sf=True),
    "1.0: packed rows": lambda: V1_CAST(random(4, 512), "e4m3", 128, round_sf=True, use_packed_ue8m0=True),
    "1.0: four counts": lambda: V1_CAST(
        random(4, 256), "e4m3", 128, swiglu_clamp_value=1.0, clamped_count=ints(*[0] * 4, dtype=torch.int64)
    ),
    "1.0: clamp minimum": lambda: V1_CAST(random(4, 256), "e4m3", 128, sf_clamp_min=0.0),
    "channels: rows": lambda: v1.quant.swiglu_forward_and_per_channel_cast_and_transpose(random(64, 256), "e4m3", 32),
    "channels: block": lambda: v1.quant.swiglu_forward_and_per_channel_cast_and_transpose(random(128, 256), "e4m3", 64),
    "channels: dtype": lambda: v1.quant.swiglu_forward_and_per_channel_cast_and_transpose(random(128, 256, dtype=F32), "e4m3", 32),
    "backward: dtypes": lambda: ops.quant.swiglu_backward(random(4, 256), random(4, 128, dtype=F32), "bf16"),
    "backward: shapes": lambda: ops.quant.swiglu_backward(random(4, 256), random(4, 64), "bf16"),
    "backward: scales": lambda: BACKWARD(quantised(4, 256, 64), random(4, 128), "e4m3", 32),
    "backward: block": lambda: BACKWARD(quantised(4, 128, 128), random(4, 64), "e4m3", 128),
    "backward: rows apart": lambda: ops.quant.swiglu_backward(random(4, 512)[:, :256], random(4, 128), "bf16"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_calls_outside_the_contract_are_refused(name: str) -> None:
    before = native().launch_count()
    with pytest.raises((ArgumentError, NoVariantError)):
        REFUSED[name]()
    assert native().launch_count() == before


def forward_args(**given: Any) -> tuple[Any, ...]:
    return (random(5, 256), None, random(5, dtype=F32), None, ints(2, 5), *given.values())


OP_CALLS = {
    "swiglu_forward_and_per_token_cast": lambda: (
        forward_args(
            out=torch.zeros(5, 128, device="cuda").to(E4M3),
            sf=torch.zeros(5, 1, device="cuda"),
            counts=ints(0, 0, 0, 0, dtype=torch.int64),
        ),
        {"block": 128, "alignment": 1, "clamp_value": 0.5},
    ),
    "swiglu_forward": lambda: (forward_args(out=torch.zeros(5, 128, device="cuda"), counts=None), {"alignment": 4}),
    "swiglu_forward_and_per_channel_cast_and_transpose": lambda: ((random(128, 256),), {"block": 32}),
    "swiglu_backward_and_per_token_cast": lambda: (
        (*quantised(5, 256, 32), random(5, 128), random(5, dtype=F32), ints(2, 5), random(5, dtype=F32), random(5, 128)),
        {"block": 32, "sf_format": "ue8m0", "col_major": True, "alignment": 4},
    ),
    "swiglu_backward": lambda: ((random(5, 256), random(5, 128), None, None, None, None), {"out_dtype": BF16}),
    "swiglu_backward_mapped": lambda: (
        (
            *quantised(3, 256, 32),
            random(3, 128),
            random(2, 2, dtype=F32),
            ints(1, -1, 3),
            ints([-1, 0], [-1, 2]),
            random(2, 2, dtype=F32),
        ),
        {"block": 32},
    ),
}


@pytest.mark.parametrize("name", OP_CALLS)
def test_opcheck(name: str) -> None:
    args, keywords = OP_CALLS[name]()
    opcheck(getattr(torch.ops.tkbuild, name), args, keywords)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's own modules, when they are first imported
def test_functions_in_a_compiled_graph() -> None:
    def chain(x: torch.Tensor, grad: torch.Tensor) -> tuple[torch.Tensor, ...]:
        data, sf = CAST(x, "e4m3", 128, use_tma_aligned_col_major_sf=True)
        return data.view(torch.uint8), sf, *ops.quant.swiglu_backward(x, grad, "bf16", do_recompute=True)

    torch._dynamo.reset()
    compiled = torch.compile(chain, fullgraph=True, backend="aot_eager")
    x, grad = random(64, 512), random(64, 256)
    for found, expected in zip(compiled(x, grad), chain(x, grad), strict=True):
        assert same(found, expected)

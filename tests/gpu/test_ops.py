"""The public functions on a GPU: against their references, on every layout that the contract names."""

from __future__ import annotations

import pytest
import torch
from gpu_checks import same

from tkbuild import ops
from tkbuild.errors import ArgumentError, NoVariantError
from tkbuild.ops import v1
from tkbuild.reference import engram as engram_reference
from tkbuild.reference import mhc as mhc_reference
from tkbuild.reference import moe as moe_reference
from tkbuild.reference import quant as quant_reference
from tkbuild.runtime.launcher import native

pytestmark = pytest.mark.gpu

E4M3 = torch.float8_e4m3fn


def random(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(shape, device="cuda").to(dtype)


@pytest.mark.parametrize("dtype", [E4M3, torch.bfloat16, torch.float32])
def test_transposes(dtype: torch.dtype) -> None:
    x = random(3, 192, 320, dtype=dtype)
    assert same(ops.transpose.batched_transpose(x), x.transpose(1, 2).contiguous())
    assert same(ops.transpose.transpose(x[1]), x[1].T.contiguous())
    assert same(v1.transpose.transpose(x[1, :, 64:128]), x[1, :, 64:128].T.contiguous())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("block", [32, 64, 128])
@pytest.mark.parametrize(
    ("col_major", "round_sf", "packed"),
    [(False, False, False), (True, False, False), (False, True, False), (True, True, False), (True, True, True)],
)
def test_per_token_cast_of_a_slice(dtype: torch.dtype, block: int, col_major: bool, round_sf: bool, packed: bool) -> None:
    x = random(33, 8192, dtype=dtype)[:, 4096:]
    flags = {"use_tma_aligned_col_major_sf": col_major, "round_sf": round_sf, "use_packed_ue8m0": packed}
    data, sf = v1.quant.per_token_cast(x, "e4m3", block, **flags)
    wanted, wanted_sf = quant_reference.per_token_cast(
        x, block=block, sf_format="ue8m0" if packed else "f32", round_sf=int(round_sf), amax_min=1e-4, col_major=col_major
    )
    assert same(data, wanted)
    assert same(sf, wanted_sf)
    assert sf.stride() == wanted_sf.stride()
    same_as_contiguous = ops.quant.per_token_cast(x.contiguous(), "e4m3", block, **flags)
    assert same(data, same_as_contiguous[0])


@pytest.mark.parametrize("fmt", ["bf16", "fp32"])
def test_round_trip(fmt: str) -> None:
    x = random(67, 2048)
    back = ops.quant.per_token_cast_back(ops.quant.per_token_cast(x, "e4m3", 128), fmt, 128)
    assert back.dtype == {"bf16": torch.bfloat16, "fp32": torch.float32}[fmt]
    assert ((back.float() - x.float()).norm() / x.float().norm()).item() < 0.04


def test_cast_into_given_buffers() -> None:
    x = random(9, 512)
    out = (torch.empty(9, 512, dtype=E4M3, device="cuda"), torch.empty(9, 4, device="cuda"))
    data, sf = ops.quant.per_token_cast(x, "e4m3", 128, out=out)
    assert (data.data_ptr(), sf.data_ptr()) == (out[0].data_ptr(), out[1].data_ptr())
    assert same(data, ops.quant.per_token_cast(x, "e4m3", 128)[0])


def test_clamp_setting_acts_at_launch() -> None:
    x = torch.zeros(1, 128, dtype=torch.bfloat16, device="cuda")
    try:
        ops.set_amax_clamp_for_quant("e4m3", False, 448.0)
        assert ops.quant.per_token_cast(x, "e4m3", 128)[1].item() == 1.0
    finally:
        ops.config.reset_runtime_config()
    assert ops.quant.per_token_cast(x, "e4m3", 128)[1].item() == pytest.approx(1e-4 / 448)


@pytest.mark.parametrize(("experts", "k"), [(1, 1), (16, 6), (72, 6), (256, 8), (384, 8), (512, 9), (1024, 32)])
def test_topk_gate(experts: int, k: int) -> None:
    scores = torch.randint(-8, 8, (257, experts), device="cuda").float()
    assert torch.equal(ops.moe.topk_gate(scores, k), moe_reference.topk_gate(scores, num_topk=k))


def test_topk_gate_ids_are_unique_and_in_range_for_any_scores() -> None:
    nan, inf = float("nan"), float("inf")
    scores = torch.randn(6, 72, device="cuda")
    scores[0], scores[1, 3], scores[2], scores[3], scores[5] = nan, nan, inf, -inf, 1.0
    scores[4, ::2], scores[4, 1::4] = nan, -inf
    ids = ops.moe.topk_gate(scores, 6)
    assert ((ids >= 0) & (ids < 72)).all()
    assert all(len(set(row)) == 6 for row in ids.tolist())


def test_engram() -> None:
    wh, we = random(4, 2048), random(4, 2048)
    assert same(ops.engram.fused_weight(wh, we), engram_reference.fused_weight(wh, we))
    partial, gwh, gwe = (random(*shape, dtype=torch.float32) for shape in ((132, 4, 2048), (4, 2048), (4, 2048)))
    wanted = engram_reference.grad_w_reduce(partial, wh, we, gwh, gwe)
    assert ops.engram.grad_w_reduce(partial, wh, we, gwh, gwe) is None
    assert same(gwh, wanted[0])
    assert same(gwe, wanted[1])


def test_sinkhorn_layer_forward_and_backward() -> None:
    x = torch.randn(5, 7, 4, 4, device="cuda", requires_grad=True)
    grad = torch.randn(5, 7, 4, 4, device="cuda")
    y = ops.modeling.mhc.sinkhorn_normalize(x, 10, 1e-6)
    y.backward(grad)
    x64 = x.detach().double().requires_grad_()
    y64 = mhc_reference.sinkhorn(x64.view(-1, 4, 4), repeat=10, eps=1e-6).view(x.shape)
    y64.backward(grad.double())
    torch.testing.assert_close(y.detach(), y64.detach().float())
    torch.testing.assert_close(x.grad, x64.grad.float(), rtol=1e-4, atol=1e-5)


def test_sinkhorn_without_gradient_and_under_inference_mode() -> None:
    x = torch.randn(3, 4, 4, device="cuda")
    assert not ops.modeling.mhc.sinkhorn_normalize(x).requires_grad
    with torch.inference_mode():
        y = ops.modeling.mhc.sinkhorn_normalize(x)
    torch.testing.assert_close(y.sum(-2), torch.ones(3, 4, device="cuda"), rtol=1e-4, atol=1e-4)


def test_no_rows_launch_nothing() -> None:
    before = native().launch_count()
    wide = random(8, 4096)
    for x in (wide[5:5], torch.empty(0, 7168, dtype=torch.bfloat16, device="cuda")):
        data, sf = ops.quant.per_token_cast(x, "e4m3", 128, use_tma_aligned_col_major_sf=True)
        assert (data.shape[0], sf.shape) == (0, (0, x.shape[1] // 128))
        assert ops.transpose.transpose(x).shape == (x.shape[1], 0)
    assert ops.moe.topk_gate(torch.empty(0, 256, device="cuda"), 8).shape == (0, 8)
    assert native().launch_count() == before


def test_strides_of_single_rows_do_not_matter() -> None:
    base = random(1, 4096)
    odd = base.as_strided((1, 4096), (999, 1))
    assert same(ops.quant.per_token_cast(odd, "e4m3", 128)[0], ops.quant.per_token_cast(base, "e4m3", 128)[0])


@pytest.mark.parametrize(
    "make",
    [
        lambda x: x.T,
        lambda x: x[:, ::2],
        lambda x: x[:, 1:65],
        lambda x: x[:1].expand(128, 128).T,
        lambda x: x.half(),
        lambda x: x.cpu(),
        lambda x: x[None],
        lambda x: x[:, :96],
    ],
)
def test_layouts_outside_the_contract_are_refused(make) -> None:
    x = make(random(128, 128))
    before = native().launch_count()
    with pytest.raises((ArgumentError, NoVariantError)):
        ops.quant.per_token_cast(x, "e4m3", 128)
    assert native().launch_count() == before


def test_rows_beyond_two_to_the_31_elements() -> None:
    free, _total = torch.cuda.mem_get_info()
    if free < 16 * 2**30:
        pytest.skip("needs 16 GB of free device memory")
    rows = 2**31 // 17408 + 40
    x = torch.empty(rows, 17408, dtype=torch.bfloat16, device="cuda")
    x[-30:] = random(30, 17408)
    data, sf = ops.quant.per_token_cast(x, "e4m3", 128)
    wanted, wanted_sf = ops.quant.per_token_cast(x[-30:].clone(), "e4m3", 128)
    assert same(data[-30:], wanted)
    assert same(sf[-30:], wanted_sf)

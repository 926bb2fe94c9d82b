"""Expansion and reduction on a GPU, through the public functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from gpu_checks import opcheck, same

from tkbuild import ops
from tkbuild.errors import ArgumentError, LaunchError, NoVariantError
from tkbuild.ops import v1
from tkbuild.reference import moe as reference
from tkbuild.runtime.launcher import native

pytestmark = pytest.mark.gpu

E4M3 = torch.float8_e4m3fn
WIDTHS = [576, 2048, 2560, 3072, 4096, 6144, 7168]


def routed(tokens: int, k: int = 6, num_experts: int = 32) -> torch.Tensor:
    picked = torch.rand(tokens, num_experts, device="cuda").argsort(dim=1)[:, :k]
    return torch.where(torch.rand(tokens, k, device="cuda") > 0.25, picked, -1)


def mapping(tokens: int, k: int = 6, alignment: int = 64) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (token_topk_to_pos, pos_to_expert)."""
    found = ops.moe.get_fused_mapping(routed(tokens, k), 32, 0, alignment)
    return found[3], found[0]


def random(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(shape, device="cuda").to(dtype)


def expanded(x: torch.Tensor, rows: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
    data = x.view(torch.uint8) if x.dtype == E4M3 else x
    out = reference.expand_to_fused(data, rows, experts, None, data.new_empty((experts.shape[0], x.shape[1])), None)
    assert isinstance(out, torch.Tensor)
    return out.view(x.dtype)


# ---- expand


@pytest.mark.parametrize("hidden", WIDTHS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, E4M3])
def test_expand(hidden: int, dtype: torch.dtype) -> None:
    x = random(401, hidden, dtype=dtype)
    rows, experts = mapping(401)
    assert same(ops.moe.expand_to_fused(x, rows, experts), expanded(x, rows, experts))


@pytest.mark.parametrize("dtype", [torch.bool, torch.int8, torch.float16, torch.float64, torch.complex64])
@pytest.mark.parametrize("hidden", [1, 3, 8, 100])
def test_expand_of_any_dtype_and_width(dtype: torch.dtype, hidden: int) -> None:
    x = (torch.randn(67, hidden, device="cuda") * 3).to(dtype)
    rows, experts = mapping(67)
    assert same(ops.moe.expand_to_fused(x, rows, experts), expanded(x, rows, experts))


@pytest.mark.parametrize(("first", "width"), [(0, 512), (8, 512), (2, 500), (1, 501)])
def test_expand_of_a_slice(first: int, width: int) -> None:
    x = random(67, 1024)[:, first : first + width]
    rows, experts = mapping(67)
    assert same(ops.moe.expand_to_fused(x, rows, experts), expanded(x, rows, experts))


@pytest.mark.parametrize(("first", "width"), [(0, 4096), (8, 4096), (4, 4096), (1, 4100)])
@pytest.mark.parametrize("num_sms", [0, 7])
def test_expand_of_many_rows(first: int, width: int, num_sms: int) -> None:
    x = random(9001, 4112)[:, first : first + width]
    rows, experts = mapping(9001, k=3)
    ops.set_num_sms(num_sms)
    try:
        assert same(ops.moe.expand_to_fused(x, rows, experts), expanded(x, rows, experts))
    finally:
        ops.set_num_sms(0)


def test_many_rows_behind_a_programmatic_dependent() -> None:
    x = random(9001, 4096)
    rows, experts = mapping(9001, k=3)
    once = expanded(x, rows, experts)
    ops.set_pdl(True)
    try:
        twice = ops.moe.expand_to_fused(ops.moe.expand_to_fused(x, rows, experts)[:9001], rows, experts)
    finally:
        ops.set_pdl(False)
    assert same(twice, expanded(once[:9001], rows, experts))


@pytest.mark.parametrize("hidden", [576, 2048, 7168])
@pytest.mark.parametrize("block", [32, 128])
@pytest.mark.parametrize("packed", [False, True])
def test_expand_with_scales(hidden: int, block: int, packed: bool) -> None:
    flags = {"use_tma_aligned_col_major_sf": packed, "round_sf": True, "use_packed_ue8m0": packed}
    data, sf = v1.quant.per_token_cast(random(401, hidden), "e4m3", block, **flags)
    rows, experts = mapping(401)
    out, out_sf = ops.moe.expand_to_fused_with_sf((data, sf), block, rows, experts, packed)
    assert same(out, expanded(data, rows, experts))
    assert same(out_sf, expanded(sf.contiguous(), rows, experts))
    count = experts.shape[0]
    assert out_sf.stride() == ((1, -(-count // 4) * 4) if packed else (sf.shape[1], 1))


def test_scales_of_two_columns_in_a_byte() -> None:
    data, sf = ops.quant.per_token_cast(random(67, 1024), "e2m1", 32)
    rows, experts = mapping(67)
    out, out_sf = ops.moe.expand_to_fused_with_sf((data, sf), 32, rows, experts)
    assert same(out, expanded(data, rows, experts))
    assert same(out_sf, expanded(sf, rows, experts))


def test_without_tokens_every_row_is_padding() -> None:
    empty, rows = random(0, 256), torch.empty((0, 6), dtype=torch.int32, device="cuda")
    padding = torch.full((300,), -1, dtype=torch.int32, device="cuda")
    assert not ops.moe.expand_to_fused(empty, rows, padding).any()
    out, sf = ops.moe.expand_to_fused_with_sf((empty.to(E4M3), torch.empty(0, 2, device="cuda")), 128, rows, padding)
    assert not out.view(torch.uint8).any()
    assert not sf.any()


# ---- reduce


@pytest.mark.parametrize("hidden", [256, *WIDTHS])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("fp8_format", ["", "e4m3"])
@pytest.mark.parametrize("given", ["", "weights", "x_sf", "weights x_sf"])
def test_reduce(hidden: int, dtype: torch.dtype, fp8_format: str, given: str) -> None:
    rows, experts = mapping(301)
    x = random(experts.shape[0], hidden, dtype=dtype)
    weights = torch.rand(rows.shape, device="cuda") if "weights" in given else None
    x_sf = torch.rand(x.shape[0], device="cuda") + 0.5 if "x_sf" in given else None
    sf = torch.rand(1, device="cuda") * 100 if fp8_format else None
    found = ops.moe.reduce_fused(x if x_sf is None else (x, x_sf), weights, rows, fp8_format, sf)
    out_dtype = "float8_e4m3fn" if fp8_format else str(dtype).removeprefix("torch.")
    assert same(found, reference.reduce_fused(x, x_sf, weights, rows, sf, out_dtype=out_dtype))


def test_reduce_into_a_buffer() -> None:
    rows, experts = mapping(67)
    x, out = random(experts.shape[0], 512), random(67, 512)
    assert ops.moe.reduce_fused(x, None, rows, out=out) is out
    assert same(out, reference.reduce_fused(x, None, None, rows, None, out_dtype="bfloat16"))


def test_reduce_of_a_slice() -> None:
    rows, experts = mapping(67)
    x = random(experts.shape[0], 1024)[:, 8:520]
    assert same(ops.moe.reduce_fused(x, None, rows), reference.reduce_fused(x, None, None, rows, None, out_dtype="bfloat16"))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_reduce_undoes_expand(dtype: torch.dtype) -> None:
    x = torch.randint(-8, 9, (401, 2048), device="cuda").to(dtype)
    rows, experts = mapping(401, k=8)
    sums = ops.moe.reduce_fused(ops.moe.expand_to_fused(x, rows, experts), None, rows)
    assert same(sums, x * (rows >= 0).sum(dim=1, keepdim=True).to(dtype))


def test_reduce_of_no_rows_is_zero() -> None:
    rows = torch.randint(-5, 5, (9, 3), dtype=torch.int32, device="cuda")
    assert not ops.moe.reduce_fused(random(0, 256), None, rows).any()


# ---- contract


def given_inputs() -> dict[str, Any]:
    rows, experts = mapping(64)
    return {
        "x": random(64, 256),
        "rows": rows,
        "experts": experts,
        "y": random(experts.shape[0], 256),
        "w": torch.ones_like(rows).float(),
    }


@pytest.mark.parametrize(
    "call",
    [
        lambda x, rows, experts, y, w: ops.moe.expand_to_fused(x.T, rows, experts),
        lambda x, rows, experts, y, w: ops.moe.expand_to_fused(x[:, ::2], rows, experts),
        lambda x, rows, experts, y, w: ops.moe.expand_to_fused(x[0], rows, experts),
        lambda x, rows, experts, y, w: ops.moe.expand_to_fused(x[:5], rows, experts),
        lambda x, rows, experts, y, w: ops.moe.expand_to_fused(x, rows.long(), experts),
        lambda x, rows, experts, y, w: ops.moe.expand_to_fused(x, rows, experts.long()),
        lambda x, rows, experts, y, w: ops.moe.expand_to_fused(x, rows[:, :3], experts),
        lambda x, rows, experts, y, w: ops.moe.expand_to_fused(x, rows, experts[None]),
        lambda x, rows, experts, y, w: ops.moe.expand_to_fused(x.cpu(), rows, experts),
        lambda x, rows, experts, y, w: ops.moe.expand_to_fused(x, rows.new_zeros((64, 33)), experts),
        lambda x, rows, experts, y, w: ops.moe.expand_to_fused_with_sf((x, w[:, :2]), 64, rows, experts),
        lambda x, rows, experts, y, w: ops.moe.expand_to_fused_with_sf((x, w[:, :3]), 128, rows, experts),
        lambda x, rows, experts, y, w: ops.moe.expand_to_fused_with_sf((x, w[:, :2].half()), 128, rows, experts),
        lambda x, rows, experts, y, w: ops.moe.expand_to_fused_with_sf((x, rows[:, :1]), 128, rows, experts),
        lambda x, rows, experts, y, w: ops.moe.reduce_fused(y[:, :248], w, rows),
        lambda x, rows, experts, y, w: ops.moe.reduce_fused(y[:, 4:244], w, rows),
        lambda x, rows, experts, y, w: ops.moe.reduce_fused(y.half(), w, rows),
        lambda x, rows, experts, y, w: ops.moe.reduce_fused(y, w[:5], rows),
        lambda x, rows, experts, y, w: ops.moe.reduce_fused(y, w.bfloat16(), rows),
        lambda x, rows, experts, y, w: ops.moe.reduce_fused(y, w, rows, "e5m2"),
        lambda x, rows, experts, y, w: ops.moe.reduce_fused(y, w, rows, sf=w[0, :1]),
        lambda x, rows, experts, y, w: ops.moe.reduce_fused(y, w, rows, "e4m3", w[0, :2]),
        lambda x, rows, experts, y, w: ops.moe.reduce_fused((y, w[0]), w, rows),
        lambda x, rows, experts, y, w: ops.moe.reduce_fused(y, w, rows, out=torch.empty_like(y)),
        lambda x, rows, experts, y, w: ops.moe.reduce_fused(y, w, rows, out=torch.empty(64, 256, device="cuda")),
    ],
)
def test_what_the_contract_excludes_is_refused(call: Callable[..., object]) -> None:
    tensors = given_inputs()
    before = native().launch_count()
    with pytest.raises((ArgumentError, LaunchError, NoVariantError)):
        call(**tensors)
    assert native().launch_count() == before


def test_nothing_to_do_launches_nothing() -> None:
    before = native().launch_count()
    empty = torch.empty((0, 6), dtype=torch.int32, device="cuda")
    assert ops.moe.reduce_fused(random(5, 256), None, empty).shape == (0, 256)
    assert ops.moe.expand_to_fused(random(0, 256), empty, empty.flatten()).shape == (0, 256)
    assert native().launch_count() == before


def test_opcheck() -> None:
    tensors = given_inputs()
    out = torch.zeros(tensors["experts"].shape[0], 512, dtype=torch.uint8, device="cuda")
    given = (tensors["x"].view(torch.uint8), tensors["rows"], tensors["experts"], None, out, None, None)
    opcheck(torch.ops.tkbuild.expand_to_fused, given)
    given = (tensors["y"], None, tensors["w"], tensors["rows"], None)
    opcheck(torch.ops.tkbuild.reduce_fused, given, {"out_dtype": torch.float8_e4m3fn})

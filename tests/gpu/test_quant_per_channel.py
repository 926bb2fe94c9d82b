"""The casts of columns in blocks of rows on a GPU, against their references."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gpu_checks import opcheck, same

from tkbuild import ops
from tkbuild.errors import ArgumentError, NoVariantError
from tkbuild.ops import v1
from tkbuild.reference import quant as reference
from tkbuild.runtime.launcher import native

pytestmark = pytest.mark.gpu

CLAMP = 1e-4
E4M3 = torch.float8_e4m3fn


def all_same(got: tuple[torch.Tensor, ...], wanted: tuple[torch.Tensor, ...]) -> bool:
    return all(same(a, b) and a.stride() == b.stride() for a, b in zip(got, wanted, strict=True))


def random(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(shape, device="cuda").to(dtype)


def quantised(rows: int, columns: int, c: int) -> tuple[torch.Tensor, torch.Tensor]:
    return random(rows, columns).to(E4M3), torch.rand(rows, -(-columns // c), device="cuda") + 0.01


def by_reference(
    x: torch.Tensor, block: int, round_sf: bool, packed: bool = False, pos: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    rows = len(x) if pos is None else len(pos)
    sf_format = "ue8m0" if packed else "f32"
    return reference.per_channel_cast(x, pos, sf_format=sf_format, rows=rows, block=block, round_sf=int(round_sf), amax_min=CLAMP)


def quantised_by_reference(
    x: tuple[torch.Tensor, torch.Tensor], c: int, block: int, round_sf: bool, packed: bool = False, pos: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    rows = len(x[0]) if pos is None else len(pos)
    sf_format = "ue8m0" if packed else "f32"
    return reference.per_channel_cast_quantised(
        *x, pos, sf_format=sf_format, x_block=c, rows=rows, block=block, round_sf=int(round_sf), amax_min=CLAMP
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("block", [32, 128])
@pytest.mark.parametrize(("round_sf", "packed"), [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize("rows", [1, 157, 1024])
def test_cast_of_a_slice(dtype: torch.dtype, block: int, round_sf: bool, packed: bool, rows: int) -> None:
    x = random(rows, 1024, dtype=dtype)[:, 256 : 256 + 576]
    got = ops.quant.per_channel_cast(x, "e4m3", block, round_sf, use_packed_ue8m0=packed)
    assert all_same(got, by_reference(x, block, round_sf, packed))
    if not packed:
        assert all_same(v1.quant.per_channel_cast(x, "e4m3", block, round_sf), got)


@pytest.mark.parametrize("c", [32, 128])
@pytest.mark.parametrize("block", [32, 128])
@pytest.mark.parametrize(("round_sf", "packed"), [(False, False), (True, False), (True, True)])
def test_quantised_input(c: int, block: int, round_sf: bool, packed: bool) -> None:
    data, sf = quantised(157, 1024, c)
    columns = torch.empty(1024 // c, 400, device="cuda").T[100:257].copy_(sf)
    words = torch.randint(100, 130, (157, -(-1024 // c // 4) * 4), device="cuda").to(torch.uint8).view(torch.int32)
    for scales in (sf, columns, words, sf.to(E4M3)):
        got = ops.quant.per_channel_cast((data, scales), "e4m3", block, round_sf, c, packed)
        assert all_same(got, quantised_by_reference((data, scales), c, block, round_sf, packed))


@pytest.mark.parametrize("round_sf", [False, True])
@pytest.mark.parametrize("rows", [16, 128, 1008])
def test_gathered_rows(round_sf: bool, rows: int) -> None:
    pos = torch.randint(-1, 301, (rows + 3,), device="cuda").int()[3:]
    x = random(301, 576)
    got = v1.quant.per_channel_cast_fused(x, "e4m3", 128, round_sf, pos_to_token=pos)
    assert all_same(got, by_reference(x, 128, round_sf, pos=pos))
    pair = quantised(301, 512, 128)
    got = v1.quant.per_channel_cast_fused(pair, "e4m3", 128, round_sf, 128, pos)
    assert all_same(got, quantised_by_reference(pair, 128, 128, round_sf, pos=pos))


def test_fused_without_a_gather() -> None:
    x = random(256, 512)
    assert all_same(v1.quant.per_channel_cast_fused(x, "e4m3"), by_reference(x, 128, False))


def test_gather_from_no_rows() -> None:
    pos = torch.full((16,), -1, dtype=torch.int32, device="cuda")
    data, sf = v1.quant.per_channel_cast_fused(random(0, 512), "e4m3", pos_to_token=pos)
    assert (data.shape, sf.shape) == ((16, 512), (1, 512))
    assert not data.float().any()
    empty = (torch.empty(0, 512, dtype=E4M3, device="cuda"), torch.empty(0, 4, device="cuda"))
    assert not v1.quant.per_channel_cast_fused(empty, "e4m3", num_per_channels=128, pos_to_token=pos)[0].float().any()


@pytest.mark.parametrize("block", [32, 128])
@pytest.mark.parametrize("round_sf", [False, True])
@pytest.mark.parametrize("rows", [16, 128, 400, 4096])
def test_transposed(block: int, round_sf: bool, rows: int) -> None:
    x = random(rows, 1024)[:, 256 : 256 + 576]
    got = v1.quant.per_channel_cast_and_transpose(x, "e4m3", block, round_sf)
    wanted = reference.per_channel_cast_and_transpose(x, block=block, round_sf=int(round_sf), amax_min=CLAMP)
    assert all_same(got, wanted)


def test_no_rows_launch_nothing() -> None:
    before = native().launch_count()
    x = random(8, 576)[4:4]
    data, sf = ops.quant.per_channel_cast(x, "e4m3", 32, True, use_packed_ue8m0=True)
    assert (data.shape, sf.shape) == ((0, 576), (0, 576))
    assert v1.quant.per_channel_cast_and_transpose(x, "e4m3", 128)[0].shape == (576, 0)
    none = torch.empty(0, dtype=torch.int32, device="cuda")
    assert v1.quant.per_channel_cast_fused(random(8, 576), "e4m3", pos_to_token=none)[0].shape == (0, 576)
    assert native().launch_count() == before


@pytest.mark.parametrize(
    "call",
    [
        lambda x: ops.quant.per_channel_cast(x, "e2m1", 128),
        lambda x: ops.quant.per_channel_cast(x, "e4m3", 64),
        lambda x: ops.quant.per_channel_cast(x, "e4m3", 128, use_packed_ue8m0=True),
        lambda x: ops.quant.per_channel_cast(x[:, :96], "e4m3", 128),
        lambda x: ops.quant.per_channel_cast(x[:, 1:65], "e4m3", 128),
        lambda x: ops.quant.per_channel_cast(x.half(), "e4m3", 128),
        lambda x: ops.quant.per_channel_cast(quantised(128, 128, 32), "e4m3", 128),
        lambda x: ops.quant.per_channel_cast(quantised(128, 128, 32), "e4m3", 128, num_per_channels=128),
        lambda x: ops.quant.per_channel_cast((x, x[:, :1].float()), "e4m3", 128, num_per_channels=128),
        lambda x: v1.quant.per_channel_cast_fused(x, "e4m3", pos_to_token=torch.zeros(16, dtype=torch.int64, device="cuda")),
        lambda x: v1.quant.per_channel_cast_and_transpose(x[:120], "e4m3", 128),
        lambda x: v1.quant.per_channel_cast_and_transpose(x.float(), "e4m3", 128),
    ],
)
def test_refusals_launch_nothing(call: Any) -> None:
    x = random(128, 128)
    before = native().launch_count()
    with pytest.raises((ArgumentError, NoVariantError)):
        call(x)
    assert native().launch_count() == before


OP_CALLS = {
    "per_channel_cast": lambda x: ((x, torch.zeros(7, dtype=torch.int32, device="cuda")), {"sf_format": "ue8m0", "rows": 7}),
    "per_channel_cast_quantised": lambda _: ((*quantised(5, 256, 128), None), {"sf_format": "f32", "x_block": 128, "rows": 5}),
    "per_channel_cast_and_transpose": lambda x: ((x,), {"block": 32}),
}


@pytest.mark.parametrize("name", OP_CALLS)
def test_opcheck(name: str) -> None:
    args, keywords = OP_CALLS[name](random(16, 256))
    opcheck(getattr(torch.ops.tkbuild, name), args, keywords)

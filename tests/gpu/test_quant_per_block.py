"""The casts in blocks of rows and columns on a GPU, against their references."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gpu_checks import opcheck, same

from tkbuild import ops
from tkbuild.errors import ArgumentError, NoVariantError
from tkbuild.ops import v1
from tkbuild.reference import quant as reference
from tkbuild.reference.quant import rules
from tkbuild.runtime.launcher import native

pytestmark = pytest.mark.gpu

CLAMPS = {"e4m3": 1e-4, "e2m1": 6 * 2.0**-126}
LAYOUTS = [
    (False, False, False),
    (True, False, False),
    (False, True, False),
    (True, True, False),
    (False, True, True),
    (True, True, True),
]


def random(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(shape, device="cuda").to(dtype)


def by_reference(
    x: torch.Tensor, fmt: str, block: tuple[int, int], col_major: bool, round_sf: bool, packed: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    sf_format = "ue8m0" if packed else "f32"
    bm, bk = block
    return reference.per_block_cast(
        x, fmt=fmt, sf_format=sf_format, bm=bm, bk=bk, round_sf=int(round_sf), amax_min=CLAMPS[fmt], col_major=col_major
    )


def flags(col_major: bool, round_sf: bool, packed: bool) -> dict[str, bool]:
    return {"use_tma_aligned_col_major_sf": col_major, "round_sf": round_sf, "use_packed_ue8m0": packed}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("fmt", ["e4m3", "e2m1"])
@pytest.mark.parametrize("block", [(32, 32), (32, 128), (128, 32), (128, 128)])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_cast_of_a_slice(dtype: torch.dtype, fmt: str, block: tuple[int, int], layout: tuple[bool, bool, bool]) -> None:
    x = random(157, 1024, dtype=dtype)[:, 256 : 256 + 576]
    data, sf = ops.quant.per_block_cast(x, fmt, block, **flags(*layout))
    wanted, wanted_sf = by_reference(x, fmt, block, *layout)
    assert same(data, wanted)
    assert same(sf, wanted_sf)
    assert sf.stride() == wanted_sf.stride()
    assert same(ops.quant.per_block_cast_with_sf_only(x, fmt, block, **flags(*layout)), wanted_sf)
    old, old_sf = v1.quant.per_block_cast(x, fmt, block, **flags(*layout))
    assert same(old, wanted)
    assert same(old_sf, wanted_sf)


@pytest.mark.parametrize("fmt", ["e4m3", "e2m1"])
@pytest.mark.parametrize("rows", [1, 31, 128, 4001])
def test_precomputed_scales_reproduce_rounded_data(fmt: str, rows: int) -> None:
    x = random(rows, 1536)
    data, sf = ops.quant.per_block_cast(x, fmt, (128, 128), round_sf=True)
    assert same(ops.quant.per_block_cast_with_precomputed_sf(x, fmt, (128, 128), sf), data)
    assert same(v1.quant.per_block_cast_with_precomputed_sf(x, fmt, (128, 128), sf, False, True), data)
    own = torch.rand_like(sf) + 0.01
    got = ops.quant.per_block_cast_with_precomputed_sf(x, fmt, (128, 128), own)
    assert same(got, reference.per_block_cast_with_precomputed_sf(x, own, fmt=fmt, bm=128, bk=128))


def test_given_buffers() -> None:
    x = random(256, 512)
    data, sf = ops.quant.per_block_cast(x, "e4m3", (128, 128))
    out = (torch.empty_like(data), torch.empty_like(sf))
    found = ops.quant.per_block_cast(x, "e4m3", (128, 128), out=out)
    assert [t.data_ptr() for t in found] == [t.data_ptr() for t in out]
    assert same(out[0], data)
    only = torch.empty_like(sf)
    assert ops.quant.per_block_cast_with_sf_only(x, "e4m3", (128, 128), out_sf=only).data_ptr() == only.data_ptr()
    assert same(only, sf)
    again = torch.empty_like(data)
    ops.quant.per_block_cast_with_precomputed_sf(x, "e4m3", (128, 128), sf, out=again)
    assert same(again, reference.per_block_cast_with_precomputed_sf(x, sf, fmt="e4m3", bm=128, bk=128))


def test_clamp_setting_acts_at_launch() -> None:
    x = torch.zeros(32, 64, dtype=torch.bfloat16, device="cuda")
    try:
        ops.set_amax_clamp_for_quant("e2m1", False, 12.0)
        assert ops.quant.per_block_cast(x, "e2m1", (32, 32))[1].tolist() == [[2.0, 2.0]]
    finally:
        ops.config.reset_runtime_config()
    assert ops.quant.per_block_cast(x, "e2m1", (32, 32))[1].tolist() == [[2.0**-126] * 2]


def test_no_rows_launch_nothing() -> None:
    before = native().launch_count()
    x = random(8, 1024)[4:4, :576]
    data, sf = ops.quant.per_block_cast(x, "e2m1", (32, 128), use_tma_aligned_col_major_sf=True)
    assert (data.shape, sf.shape) == ((0, 288), (0, 5))
    assert ops.quant.per_block_cast_with_precomputed_sf(x, "e4m3", (32, 128), torch.empty(0, 5, device="cuda")).shape == (0, 576)
    pair = (torch.empty(0, 288, dtype=torch.int8, device="cuda"), torch.empty(0, 18, device="cuda"))
    assert ops.quant.per_block_cast_lossless(pair, "e4m3", (1, 32), (128, 128))[0].shape == (0, 576)
    assert native().launch_count() == before


@pytest.mark.parametrize(
    "call",
    [
        lambda x: ops.quant.per_block_cast(x, "e5m6", (128, 128)),
        lambda x: ops.quant.per_block_cast(x, "e4m3", (64, 128)),
        lambda x: ops.quant.per_block_cast(x, "e4m3", (128, 16)),
        lambda x: ops.quant.per_block_cast(x, "e4m3", (128, 128), use_packed_ue8m0=True),
        lambda x: ops.quant.per_block_cast(x[:, :96], "e4m3", (128, 128)),
        lambda x: ops.quant.per_block_cast(x[:, 1:65], "e4m3", (128, 128)),
        lambda x: ops.quant.per_block_cast(x.T, "e4m3", (128, 128)),
        lambda x: ops.quant.per_block_cast(x.half(), "e4m3", (128, 128)),
        lambda x: ops.quant.per_block_cast(x.cpu(), "e4m3", (128, 128)),
        lambda x: ops.quant.per_block_cast_with_precomputed_sf(x, "e4m3", (128, 128), x.float()),
        lambda x: ops.quant.per_block_cast_with_precomputed_sf(x, "e4m3", (128, 128), x[:1, :1].float(), use_packed_ue8m0=True),
        lambda x: ops.quant.per_block_cast_lossless((x.view(torch.int8), x.float()), "e2m1", (1, 32), (128, 128)),
        lambda x: ops.quant.per_block_cast_lossless(fp4(128, 128), "e4m3", (1, 32), (128, 16)),
        lambda x: ops.quant.per_block_cast_lossless(fp4(128, 128), "e4m3", (1, 64), (128, 128)),
        lambda x: ops.quant.per_block_cast_lossless(fp4(128, 128), "e4m3", (1, 32), (0, 32)),
    ],
)
def test_refusals_launch_nothing(call: Any) -> None:
    x = random(128, 128)
    before = native().launch_count()
    with pytest.raises((ArgumentError, NoVariantError)):
        call(x)
    assert native().launch_count() == before


# ---- lossless


def fp4(rows: int, columns: int, spread: int = 9) -> tuple[torch.Tensor, torch.Tensor]:
    data = torch.randint(-128, 128, (rows, columns // 2), device="cuda").to(torch.int8)
    return data, torch.exp2(torch.randint(-spread, 1, (rows, columns // 32), device="cuda").float())


def packed(sf: torch.Tensor) -> torch.Tensor:
    return rules.pack_ue8m0((sf.view(torch.int32) >> 23) & 0xFF)


@pytest.mark.parametrize("block", [(1, 128), (32, 32), (128, 128)])
@pytest.mark.parametrize("x_packed", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_lossless(block: tuple[int, int], x_packed: bool, layout: tuple[bool, bool, bool]) -> None:
    data, x_sf = fp4(157, 1088)
    x_sf = packed(x_sf) if x_packed else x_sf
    out, sf = ops.quant.per_block_cast_lossless((data, x_sf), "e4m3", (1, 32), block, **flags(*layout))
    wanted, wanted_sf = reference.per_block_cast_lossless(
        data, x_sf, sf_format="ue8m0" if layout[2] else "f32", xm=1, xk=32, bm=block[0], bk=block[1], col_major=layout[0]
    )
    assert same(out, wanted)
    assert same(sf, wanted_sf)
    assert sf.stride() == wanted_sf.stride()


def test_lossless_keeps_every_value() -> None:
    data, x_sf = fp4(256, 512)
    old = rules.e2m1_values(rules.unpack_e2m1(data)) * x_sf.repeat_interleave(32, dim=1)
    out, sf = v1.quant.per_block_cast_lossless((data, x_sf), "e4m3", (1, 32), (128, 128))
    assert torch.equal(out.float() * sf.repeat_interleave(128, dim=0).repeat_interleave(128, dim=1), old)


OP_CALLS = {
    "per_block_cast": lambda x: ((x,), {"fmt": "e2m1", "sf_format": "ue8m0", "col_major": True, "bm": 32, "bk": 128}),
    "per_block_cast_with_sf_only": lambda x: ((x,), {"sf_format": "f32", "bm": 128, "bk": 128, "largest": 448.0}),
    "per_block_cast_with_precomputed_sf": lambda x: ((x, torch.ones(1, 2, device="cuda")), {"fmt": "e4m3", "bm": 128, "bk": 128}),
    "per_block_cast_lossless": lambda _: ((*fp4(5, 256), None), {"sf_format": "f32", "xm": 1, "xk": 32, "bm": 1, "bk": 128}),
}


@pytest.mark.parametrize("name", OP_CALLS)
def test_opcheck(name: str) -> None:
    args, keywords = OP_CALLS[name](random(5, 256))
    opcheck(getattr(torch.ops.tkbuild, name), args, keywords)

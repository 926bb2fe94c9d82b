"""The public casts in blocks of columns and of whole rows on a GPU, against their references."""

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

E4M3 = torch.float8_e4m3fn
#: (format of scales, flags) that a cast takes.
SCALES: list[tuple[str, dict[str, bool]]] = [
    ("f32", {}),
    ("f32", {"round_sf": True}),
    ("ue8m0", {"round_sf": True, "use_packed_ue8m0": True}),
    ("e4m3", {"use_e4m3_sf": True}),
]
LARGEST = {"e4m3": 448.0, "e2m1": 6.0}
COL_MAJOR = "use_tma_aligned_col_major_sf"
#: The arch whose stochastic results the reference gives bit for bit; others round by instructions.
SOFTWARE_ROUNDING = (9, 0)


def same_pairs(ours: tuple[torch.Tensor, torch.Tensor], wanted: tuple[torch.Tensor, torch.Tensor]) -> bool:
    return all(map(same, ours, wanted)) and ours[1].stride() == wanted[1].stride()


def random(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(shape, device="cuda").to(dtype)


def rules(fmt: str, sf_format: str, flags: dict[str, bool]) -> dict[str, Any]:
    """What the references of scales take for the flags of a public function."""
    return {
        "sf_format": sf_format,
        "round_sf": int(flags.get("round_sf", False)),
        "amax_min": ops.get_amax_clamp_for_quant(fmt, sf_format == "e4m3"),
    }


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("fmt", ["e4m3", "e2m1"])
@pytest.mark.parametrize("block", [16, 32, 64, 128])
@pytest.mark.parametrize("col_major", [False, True])
@pytest.mark.parametrize(("sf_format", "flags"), SCALES)
def test_cast_of_a_slice(dtype: torch.dtype, fmt: str, block: int, col_major: bool, sf_format: str, flags: dict[str, bool]) -> None:
    x = random(33, 2 * 1088, dtype=dtype)[:, 1088:]
    given = rules(fmt, sf_format, flags)
    wanted = reference.per_token_cast(x, fmt=fmt, block=block, col_major=col_major, **given)
    assert same_pairs(ops.quant.per_token_cast(x, fmt, block, **{COL_MAJOR: col_major}, **flags), wanted)
    alone = ops.quant.per_token_cast_with_sf_only(x, fmt, block, **{COL_MAJOR: col_major}, **flags)
    assert same(alone, wanted[1])
    assert alone.stride() == wanted[1].stride()


def codes_of(data: torch.Tensor) -> torch.Tensor:
    """The codes of e4m3 or packed e2m1 data; those of neighbours with one sign differ by 1."""
    return reference.rules.unpack_e2m1(data).int() if data.dtype == torch.int8 else data.view(torch.uint8).int()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("fmt", ["e4m3", "e2m1"])
@pytest.mark.parametrize("col_major", [False, True])
@pytest.mark.parametrize(("sf_format", "flags"), SCALES)
def test_stochastic_cast_of_a_slice(dtype: torch.dtype, fmt: str, col_major: bool, sf_format: str, flags: dict[str, bool]) -> None:
    x = random(33, 2 * 1088, dtype=dtype)[:, 1088:]
    given = {"fmt": fmt, "block": 32, "col_major": col_major, **rules(fmt, sf_format, flags)}
    data, sf = ops.quant.per_token_cast(x, fmt, 32, **{COL_MAJOR: col_major}, **flags, stochastic_cast=True)
    again, _ = ops.quant.per_token_cast(x, fmt, 32, **{COL_MAJOR: col_major}, **flags, stochastic_cast=True)
    assert same(data, again)
    nearest, wanted_sf = reference.per_token_cast(x, **given)
    assert same(sf, wanted_sf)
    assert sf.stride() == wanted_sf.stride()
    assert set((codes_of(data) - codes_of(nearest)).unique().tolist()) == {-1, 0, 1}
    if torch.cuda.get_device_capability() == SOFTWARE_ROUNDING:
        assert same(data, reference.per_token_cast_stochastic(x, **given)[0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("fmt", "largest", "values"), [("e4m3", 448.0, [0.3, 37.3, -1.07]), ("e2m1", 6.0, [0.3, 5.1, -1.07])])
def test_stochastic_codes_are_neighbours_and_unbiased(dtype: torch.dtype, fmt: str, largest: float, values: list[float]) -> None:
    """Blocks whose scale is 1; each of the four places of a quad has random bits of its own, so each is looked at."""
    for value in values:
        x = torch.full((1, 2**22), value, device="cuda", dtype=dtype)
        x[:, ::64] = largest
        data, sf = ops.quant.per_token_cast(x, fmt, 64, stochastic_cast=True)
        assert (sf == 1).all()
        found = data.float() if fmt == "e4m3" else reference.rules.e2m1_values(reference.rules.unpack_e2m1(data))
        rounded = found.view(-1, 64)[:, 4:].reshape(-1, 4).double()
        low, high = rounded.unique().tolist()
        given = x[0, 1].double()
        assert low < given < high
        neighbours = codes_of(data)[0, 4:64].unique().tolist()
        assert neighbours[1] - neighbours[0] == 1
        deviation = (high - low) / 2 / rounded.shape[0] ** 0.5
        assert ((rounded.mean(dim=0) - given).abs() <= 6 * deviation).all()


def test_stochastic_rounding_of_special_values() -> None:
    x = torch.tensor([448.0, float("nan"), -0.0, 0.0, -448.0, 1.0, 2.0**-9, 0.0] * 72, device="cuda").view(1, 576)
    data, _ = ops.quant.per_token_cast(x, "e4m3", 64, stochastic_cast=True)
    assert data.view(torch.uint8).view(-1, 8).unique(dim=0).tolist() == [[0x7E, 0x7F, 0x80, 0x00, 0xFE, 0x38, 0x01, 0x00]]
    x = torch.tensor([6.0, float("nan"), -0.0, 0.0, -6.0, 1.0, 0.5, 0.0] * 72, device="cuda").view(1, 576)
    data, _ = ops.quant.per_token_cast(x, "e2m1", 64, stochastic_cast=True)
    assert data.view(torch.uint8).view(-1, 4).unique(dim=0).tolist() == [[0x77, 0x08, 0x2F, 0x01]]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("fmt", ["e4m3", "e2m1"])
@pytest.mark.parametrize("e4m3_sf", [False, True])
def test_given_scales(dtype: torch.dtype, fmt: str, e4m3_sf: bool) -> None:
    x = random(33, 8192, dtype=dtype)[:, 4096:]
    flags = {"use_e4m3_sf": True} if e4m3_sf else {"round_sf": True}
    data, sf = ops.quant.per_token_cast(x, fmt, 32, **flags)
    assert same(ops.quant.per_token_cast_with_precomputed_sf(x, fmt, 32, sf, use_e4m3_sf=e4m3_sf), data)
    columns = sf.t().contiguous().t()
    assert same(ops.quant.per_token_cast_with_precomputed_sf(x, fmt, 32, columns, use_e4m3_sf=e4m3_sf), data)
    odd = (sf.float() * 1.3).to(sf.dtype)
    wanted = reference.per_token_cast_with_precomputed_sf(x, odd, fmt=fmt, block=32)
    assert same(ops.quant.per_token_cast_with_precomputed_sf(x, fmt, 32, odd, use_e4m3_sf=e4m3_sf), wanted)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("fmt", ["e4m3", "e2m1"])
@pytest.mark.parametrize("flags", [{}, {"round_sf": True}, {"use_e4m3_sf": True}])
def test_cast_and_cast_back_changes_a_slice_in_place(dtype: torch.dtype, fmt: str, flags: dict[str, bool]) -> None:
    wide = random(33, 8192, dtype=dtype)
    before, x = wide.clone(), wide[:, 4096:]
    given = rules(fmt, "e4m3" if flags.get("use_e4m3_sf") else "f32", flags)
    e4m3_sf = int(given.pop("sf_format") == "e4m3")
    wanted = reference.per_token_cast_and_cast_back(x.clone(), fmt=fmt, block=64, e4m3_sf=e4m3_sf, **given)
    assert ops.quant.per_token_cast_and_cast_back(x, fmt, 64, **flags) is None
    assert same(x, wanted)
    assert same(wide[:, :4096], before[:, :4096])


@pytest.mark.parametrize(("x_fmt", "x_block"), [("e4m3", (128, 128)), ("e4m3", (1, 32)), ("e2m1", (32, 32)), ("e2m1", (1, 16))])
@pytest.mark.parametrize("fmt", ["e4m3", "e2m1"])
@pytest.mark.parametrize(("sf_format", "flags"), SCALES)
@pytest.mark.parametrize("x_sf_format", ["f32", "ue8m0", "e4m3"])
def test_cast_of_quantised_data(
    x_fmt: str, x_block: tuple[int, int], fmt: str, sf_format: str, flags: dict[str, bool], x_sf_format: str
) -> None:
    rows, columns = 77, 1152
    x, _ = ops.quant.per_token_cast(random(rows, columns), x_fmt, 64)
    x_sf = scales(-(-rows // x_block[0]), -(-columns // x_block[1]), x_sf_format)
    given = {**rules(fmt, sf_format, flags), "fmt": fmt, "block": 64, "xm": x_block[0], "xk": x_block[1]}
    for stored in (x_sf, reference.rules.column_major(x_sf)):
        wanted = reference.per_token_recast(x, stored, col_major=True, **given)
        assert same_pairs(ops.quant.per_token_cast((x, stored), fmt, 64, x_block, True, **flags), wanted)


def scales(rows: int, columns: int, sf_format: str) -> torch.Tensor:
    exponents = torch.randint(-8, 6, (rows, columns), device="cuda")
    if sf_format == "ue8m0":
        return reference.rules.pack_ue8m0((exponents + 127).int())
    sf = torch.exp2(exponents.float()) * (1 + torch.rand(rows, columns, device="cuda"))
    return sf.to(E4M3) if sf_format == "e4m3" else sf


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("fmt", "columns"), [("e4m3", 576), ("e2m1", 7168), ("e2m1", 12288), ("e5m6", 24), ("e5m6", 2056)])
@pytest.mark.parametrize("flags", [{}, {"round_sf": True}, {COL_MAJOR: True, "round_sf": True, "use_packed_ue8m0": True}])
def test_whole_rows(dtype: torch.dtype, fmt: str, columns: int, flags: dict[str, bool]) -> None:
    x = random(31, columns + 64, dtype=dtype)[:, 64:]
    clamp = 1e-4 if fmt == "e5m6" else ops.get_amax_clamp_for_quant(fmt, False)
    wanted = reference.per_row_cast(
        x,
        fmt=fmt,
        sf_format="ue8m0" if flags.get("use_packed_ue8m0") else "f32",
        col_major=flags.get(COL_MAJOR, False),
        round_sf=int(flags.get("round_sf", False)),
        amax_min=clamp,
    )
    assert same_pairs(v1.quant.per_token_cast(x, fmt, columns, **flags), wanted)


def test_the_functions_of_release_1() -> None:
    x = random(33, 576)
    for ours, wanted in zip(v1.quant.per_token_cast(x, "e2m1", 32), ops.quant.per_token_cast(x, "e2m1", 32), strict=True):
        assert same(ours, wanted)
    data, sf = v1.quant.per_token_cast(x, "e4m3", 64, None, True, True, True)
    assert same(v1.quant.per_token_cast_with_sf_only(x, "e4m3", 64, None, True, True, True), sf)
    sf = v1.quant.per_token_cast_with_sf_only(x, "e4m3", 64, round_sf=True)
    assert same(v1.quant.per_token_cast_with_precomputed_sf(x, "e4m3", 64, sf, round_sf=True), data)


def test_results_go_into_given_buffers() -> None:
    x = random(9, 576)
    data, sf = torch.empty(9, 288, dtype=torch.int8, device="cuda"), torch.empty(9, 18, device="cuda")
    wanted = ops.quant.per_token_cast(x, "e2m1", 32)
    given = ops.quant.per_token_cast(x, "e2m1", 32, out=(data, sf))
    assert [t.data_ptr() for t in given] == [data.data_ptr(), sf.data_ptr()]
    assert same_pairs(given, wanted)
    sf.zero_()
    assert ops.quant.per_token_cast_with_sf_only(x, "e2m1", 32, out_sf=sf) is sf
    assert same(sf, wanted[1])
    data.zero_()
    assert ops.quant.per_token_cast_with_precomputed_sf(x, "e2m1", 32, torch.ones_like(sf), out=data) is data
    assert same(data, reference.per_token_cast_with_precomputed_sf(x, torch.ones_like(sf), fmt="e2m1", block=32))


def test_no_rows_launch_nothing() -> None:
    before = native().launch_count()
    x = random(0, 576)
    data, sf = ops.quant.per_token_cast(x, "e2m1", 32, use_tma_aligned_col_major_sf=True, use_e4m3_sf=True)
    assert (data.shape, sf.shape, sf.dtype) == ((0, 288), (0, 18), E4M3)
    assert ops.quant.per_token_cast(x, "e4m3", 64, stochastic_cast=True)[0].shape == (0, 576)
    assert ops.quant.per_token_cast_with_sf_only(x, "e4m3", 64).shape == (0, 9)
    assert ops.quant.per_token_cast_with_precomputed_sf(x, "e4m3", 64, sf.float()[:, :9]).shape == (0, 576)
    ops.quant.per_token_cast_and_cast_back(x, "e4m3", 64)
    empty = torch.empty(0, 576, dtype=E4M3, device="cuda"), torch.empty(0, 18, device="cuda")
    assert ops.quant.per_token_cast(empty, "e2m1", 64, (1, 32))[0].shape == (0, 288)
    assert v1.quant.per_token_cast(x, "e5m6", 576)[0].shape == (0, 864)
    assert native().launch_count() == before


X = (4, 576)


@pytest.mark.parametrize(
    "call",
    [
        lambda x: ops.quant.per_token_cast(x, "e5m2", 32),
        lambda x: ops.quant.per_token_cast(x, "e4m3", 24),
        lambda x: ops.quant.per_token_cast(x, "e4m3", 256),
        lambda x: ops.quant.per_token_cast(x, "e4m3", 32, use_packed_ue8m0=True),
        lambda x: ops.quant.per_token_cast(x, "e4m3", 32, round_sf=True, use_e4m3_sf=True),
        lambda x: ops.quant.per_token_cast(x, "e4m3", 24, stochastic_cast=True),
        lambda x: ops.quant.per_token_cast(x.half(), "e4m3", 32, stochastic_cast=True),
        lambda x: ops.quant.per_token_cast(x, "e4m3", 32, (1, 32), stochastic_cast=True),
        lambda x: ops.quant.per_token_cast(
            (x.to(E4M3), torch.ones(4, 18, device="cuda")), "e4m3", 32, (1, 32), stochastic_cast=True
        ),
        lambda x: ops.quant.per_token_cast(x, "e4m3", 32, (1, 32)),
        lambda x: ops.quant.per_token_cast((x.to(E4M3), torch.ones(4, 18, device="cuda")), "e4m3", 32),
        lambda x: ops.quant.per_token_cast((x.to(E4M3), torch.ones(4, 17, device="cuda")), "e4m3", 32, (1, 32)),
        lambda x: ops.quant.per_token_cast((x.to(E4M3), torch.ones(4, 72, device="cuda")), "e4m3", 32, (1, 8)),
        lambda x: ops.quant.per_token_cast((x.to(E4M3), torch.ones(2, 18, device="cuda")), "e4m3", 32, (3, 32)),
        lambda x: ops.quant.per_token_cast(x[:, :560], "e2m1", 16),
        lambda x: ops.quant.per_token_cast(x[:, 1:65], "e2m1", 16),
        lambda x: ops.quant.per_token_cast(x.half(), "e2m1", 16),
        lambda x: ops.quant.per_token_cast(x.cpu(), "e2m1", 16),
        lambda x: ops.quant.per_token_cast_with_sf_only(x, "e4m3", 32, True, out_sf=torch.ones(4, 18, device="cuda")),
        lambda x: ops.quant.per_token_cast_with_sf_only(x, "e4m3", 32, out_sf=torch.ones(4, 17, device="cuda")),
        lambda x: ops.quant.per_token_cast_with_precomputed_sf(x, "e4m3", 32, torch.ones(4, 18, device="cuda"), True),
        lambda x: ops.quant.per_token_cast_with_precomputed_sf(x, "e4m3", 32, torch.ones(4, 18, device="cuda"), use_e4m3_sf=True),
        lambda x: ops.quant.per_token_cast_with_precomputed_sf(x, "e4m3", 32, torch.ones(4, 9, device="cuda")),
        lambda x: ops.quant.per_token_cast_and_cast_back(x, "e4m3", 128),
        lambda x: v1.quant.per_token_cast(x, "e4m3", 288),
        lambda x: v1.quant.per_token_cast(x, "e5m6", 64),
        lambda x: v1.quant.per_token_cast(x[:, :564], "e5m6", 564),
        lambda x: v1.quant.per_token_cast((x.to(E4M3), torch.ones(4, 1, device="cuda")), "e5m6", 576, (1, 576)),
        lambda x: v1.quant.per_token_cast_with_sf_only(x, "e4m3", 32, (1, 32)),
    ],
)
def test_calls_outside_the_contract_are_refused_before_a_launch(call: Any) -> None:
    x = random(*X)
    before = native().launch_count()
    with pytest.raises((ArgumentError, NoVariantError)):
        call(x)
    assert native().launch_count() == before


OP_CALLS = {
    "cast": lambda x: (
        torch.ops.tkbuild.per_token_cast,
        (x,),
        {"fmt": "e2m1", "sf_format": "e4m3", "col_major": True, "block": 32, "round_sf": 0, "amax_min": 1e-2},
    ),
    "stochastic": lambda x: (
        torch.ops.tkbuild.per_token_cast_stochastic,
        (x,),
        {"fmt": "e4m3", "sf_format": "f32", "col_major": False, "block": 32, "round_sf": 1, "amax_min": 1e-4},
    ),
    "sf_only": lambda x: (
        torch.ops.tkbuild.per_token_cast_with_sf_only,
        (x,),
        {"sf_format": "ue8m0", "col_major": True, "block": 32, "round_sf": 1, "amax_min": 1e-4, "largest": 6.0},
    ),
    "precomputed": lambda x: (
        torch.ops.tkbuild.per_token_cast_with_precomputed_sf,
        (x, torch.ones(7, 18, device="cuda"), None),
        {"fmt": "e2m1", "block": 32},
    ),
    "in place": lambda x: (torch.ops.tkbuild.per_token_cast_and_cast_back, (x,), {"fmt": "e2m1", "block": 32}),
    "recast": lambda x: (
        torch.ops.tkbuild.per_token_recast,
        (x.to(E4M3), torch.ones(7, 18, device="cuda"), None, None),
        {"fmt": "e2m1", "sf_format": "f32", "col_major": True, "xm": 1, "xk": 32, "block": 64},
    ),
    "rows": lambda x: (torch.ops.tkbuild.per_row_cast, (x,), {"fmt": "e5m6", "sf_format": "f32", "col_major": True}),
}


@pytest.mark.parametrize("name", OP_CALLS)
def test_opcheck(name: str) -> None:
    op, args, keywords = OP_CALLS[name](random(7, 576))
    opcheck(op, args, keywords)

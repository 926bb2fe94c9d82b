"""The casts back from quantised formats on a GPU: every format and layout of scales, through the public functions."""

from __future__ import annotations

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
DTYPES = {"bf16": "bfloat16", "fp32": "float32"}
#: data dtype -> bytes of 64 columns, and the call's x_special_fmt
FORMATS = {E4M3: (64, None), torch.int8: (32, None), torch.uint8: (96, "e5m6")}
SCALES = ["f32", "column-major f32", "e4m3", "column-major e4m3", "packed", "column-major packed", "token-packed"]


def random_bytes(*shape: int) -> torch.Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8, device="cuda")


def data_of(rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    return random_bytes(rows, columns // 64 * FORMATS[dtype][0]).view(dtype)


def column_major(sf: torch.Tensor) -> torch.Tensor:
    return sf.T.contiguous().T


def scales_of(kind: str, rows: int, columns: int) -> torch.Tensor:
    """Scales of ``rows`` x ``columns`` blocks with random values in the layout ``kind``."""
    if kind == "token-packed":
        return random_bytes(-(-rows // 4), 4 * columns).view(torch.int32)
    if kind.endswith("packed"):
        sf = random_bytes(rows, -(-columns // 4) * 4).view(torch.int32)
    else:
        sf = torch.exp2(torch.randn(rows, columns, device="cuda") * 2).to(E4M3 if kind.endswith("e4m3") else torch.float32)
    return column_major(sf) if kind.startswith("column-major") else sf


@pytest.mark.parametrize("fmt", DTYPES)
@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("kind", SCALES)
@pytest.mark.parametrize("block", [(1, 128), (1, 32), (32, 32), (128, 1), (3, 20)])
def test_cast_back(fmt: str, dtype: torch.dtype, kind: str, block: tuple[int, int]) -> None:
    rows, columns = 261, 576
    special = FORMATS[dtype][1]
    if (special and kind.endswith("e4m3")) or (kind == "token-packed" and block[1] != 1):
        pytest.skip("not a combination of the contract")
    data = data_of(rows, columns, dtype)
    sf = scales_of(kind, -(-rows // block[0]), -(-columns // block[1]))
    wanted = reference.cast_back(
        data, sf, out_dtype=DTYPES[fmt], bm=block[0], bk=block[1], token_packed=int(kind == "token-packed")
    )
    assert same(ops.quant.cast_back((data, sf), fmt, block, special), wanted)
    if block[0] == 1:
        assert same(v1.quant.per_token_cast_back((data, sf), fmt, block[1], special), wanted)


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("rows", [1, 2, 63, 64, 67])
def test_slices(dtype: torch.dtype, rows: int) -> None:
    width, special = FORMATS[dtype]
    wide, sf = data_of(rows + 3, 768, dtype), torch.rand(rows + 3, 8, device="cuda")
    for first in (0, 1, 3):
        data, scales = wide[3:, first * width : (first + 4) * width], sf[3:, 1:5]
        wanted = reference.cast_back(data, scales, out_dtype="bfloat16", bm=1, bk=64)
        assert same(ops.quant.per_token_cast_back((data, scales), "bf16", 64, special), wanted)


def test_rows_at_multiples_of_4_bytes() -> None:
    for dtype, (width, special) in FORMATS.items():
        data = random_bytes(67 * (4 * width + 4)).view(dtype).as_strided((67, 4 * width), (4 * width + 4, 1))
        sf = torch.rand(67, 2, device="cuda")
        wanted = reference.cast_back(data, sf, out_dtype="bfloat16", bm=1, bk=128)
        assert same(ops.quant.per_token_cast_back((data, sf), "bf16", 128, special), wanted)


@pytest.mark.parametrize("columns", [8, 24, 1000])
@pytest.mark.parametrize("fmt", DTYPES)
def test_e5m6_with_any_number_of_groups(columns: int, fmt: str) -> None:
    data = random_bytes(66, columns // 2 * 3)
    sf = torch.rand(66, 1, device="cuda")
    for part in (slice(0, 66), slice(1, 40), slice(5, 6)):
        wanted = reference.cast_back(data[part], sf[part], out_dtype=DTYPES[fmt], bm=1, bk=columns)
        assert same(ops.quant.per_token_cast_back((data[part], sf[part]), fmt, columns, "e5m6"), wanted)


def test_no_rows_launch_nothing() -> None:
    before = native().launch_count()
    for dtype, (_, special) in FORMATS.items():
        out = ops.quant.per_token_cast_back((data_of(0, 128, dtype), torch.empty(0, 1, device="cuda")), "fp32", 128, special)
        assert (out.shape, out.dtype) == ((0, 128), torch.float32)
    assert native().launch_count() == before


@pytest.mark.parametrize(
    ("dtype", "change"),
    [
        (E4M3, {"fmt": "fp16"}),
        (E4M3, {"x_special_fmt": "e5m6"}),
        (E4M3, {"x_special_fmt": "e4m3"}),
        (torch.uint8, {}),
        (torch.int8, {"x_special_fmt": "e5m6"}),
        (E4M3, {"x_block_size": (0, 128)}),
        (E4M3, {"x_block_size": (1, 64)}),
        (torch.float16, {}),
        (E4M3, {"sf": torch.float16}),
        (E4M3, {"data": lambda data: data[:, :-32]}),
        (E4M3, {"data": lambda data: data.T}),
        (E4M3, {"data": lambda data: data[:, ::2]}),
        (E4M3, {"data": lambda data: data.cpu()}),
        (E4M3, {"data": lambda data: data[None]}),
    ],
)
def test_what_the_contract_excludes_is_refused(dtype: torch.dtype, change: dict) -> None:
    data = torch.zeros(128, 384, dtype=torch.uint8, device="cuda")
    data = data.view(dtype) if dtype.itemsize == 1 else data.to(dtype)
    data = change.get("data", lambda data: data)(data)
    sf = torch.ones(128, 3, device="cuda").to(change.get("sf", torch.float32))
    given = {"fmt": "bf16", "x_block_size": (1, 128), "x_special_fmt": None}
    before = native().launch_count()
    with pytest.raises((ArgumentError, NoVariantError)):
        ops.quant.cast_back((data, sf), **{**given, **{name: change[name] for name in given if name in change}})
    assert native().launch_count() == before


def test_unpack_agrees_with_the_cast_back() -> None:
    data = data_of(5, 128, torch.int8)
    wanted = ops.quant.cast_back((data, torch.ones(5, 1, device="cuda")), "fp32", (1, 128))
    assert same(ops.quant.unpack_from_e2m1fn_x2(data), wanted)


@pytest.mark.parametrize("dtype", FORMATS)
def test_opcheck(dtype: torch.dtype) -> None:
    keywords = {"out_dtype": torch.bfloat16, "bm": 1, "bk": 128, "token_packed": 0}
    no_nan = data_of(5, 128, dtype).view(torch.uint8).fill_(0x11).view(dtype)  # a NaN equals no other
    opcheck(torch.ops.tkbuild.cast_back, (no_nan, torch.rand(5, 1, device="cuda"), None, None), keywords)

"""The element-wise casts on a GPU, through the public function."""

from __future__ import annotations

import itertools

import pytest
import torch
from gpu_checks import opcheck, same

from tkbuild import ops
from tkbuild.errors import ArgumentError, NoVariantError
from tkbuild.reference import quant as reference
from tkbuild.runtime.launcher import native

pytestmark = pytest.mark.gpu

E4M3 = torch.float8_e4m3fn
NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16", E4M3: "float8_e4m3fn"}
STOCHASTIC = [(torch.float32, torch.bfloat16), (torch.float32, E4M3), (torch.bfloat16, E4M3)]
#: The arch whose results the reference gives bit for bit; others round by instructions.
SOFTWARE_ROUNDING = (9, 0)


def random(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return (torch.randn(shape, device="cuda") * 8).to(dtype)


def next_towards(values: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the numbers of ``dtype`` just below and above the magnitudes of ``values``, both the same where one is equal."""
    integer = {torch.bfloat16: torch.int16, E4M3: torch.uint8}[dtype]
    every = torch.arange(0x7F80 if dtype == torch.bfloat16 else 0x7F, device="cuda").to(integer).view(dtype).float().double()
    magnitudes = values.double().abs()
    above = torch.searchsorted(every, magnitudes).clamp(max=every.numel() - 1)
    below = torch.where(every[above] > magnitudes, above - 1, above).clamp(min=0)
    return every[below], every[above]


@pytest.mark.parametrize(("source", "target"), list(itertools.permutations(NAMES, 2)))
@pytest.mark.parametrize("shape", [(), (1,), (3, 5, 7), (67, 576), (4096,), (8193,), (2, 0, 3)])
def test_cast(source: torch.dtype, target: torch.dtype, shape: tuple[int, ...]) -> None:
    x = random(*shape, dtype=source)
    got = ops.quant.cast(x, target)
    assert got.is_contiguous()
    assert same(got.flatten(), reference.cast(x.flatten(), out_dtype=NAMES[target]))
    assert got.shape == x.shape


@pytest.mark.parametrize("target", [torch.bfloat16, torch.float16, E4M3])
def test_special_values(target: torch.dtype) -> None:
    x = torch.tensor([float("nan"), float("inf"), -float("inf"), -0.0, 1e-45, 464.0, 65520.0, 3.4e38] * 1024, device="cuda")
    assert same(ops.quant.cast(x, target), reference.cast(x, out_dtype=NAMES[target]))


@pytest.mark.parametrize("first", [1, 2, 3, 4, 8])
def test_tensors_that_start_anywhere(first: int) -> None:
    for source, target in itertools.permutations(NAMES, 2):
        x = random(20000, dtype=source)[first:]
        assert same(ops.quant.cast(x, target), reference.cast(x, out_dtype=NAMES[target]))


def test_a_cast_to_the_own_type_is_a_copy() -> None:
    x = random(5, 7)
    copy = ops.quant.cast(x, torch.float32)
    assert same(copy, x)
    assert copy.data_ptr() != x.data_ptr()


# ---- stochastic rounding


@pytest.mark.parametrize(("source", "target"), STOCHASTIC)
@pytest.mark.parametrize("shape", [(4,), (3, 5, 8), (100, 576), (0, 4), (2**20 + 12,)])
def test_stochastic_results_are_neighbours(source: torch.dtype, target: torch.dtype, shape: tuple[int, ...]) -> None:
    x = random(*shape, dtype=source) * torch.exp2(torch.randint(-12, 5, shape, device="cuda").float()).to(source)
    got = ops.quant.cast(x, target, stochastic_rounding=True)
    assert same(got, ops.quant.cast(x, target, stochastic_rounding=True))
    below, above = next_towards(x, target)
    magnitudes = got.float().double().abs()
    assert ((magnitudes == below) | (magnitudes == above)).all()
    assert torch.equal(got.float().signbit(), x.signbit())
    if torch.cuda.get_device_capability() == SOFTWARE_ROUNDING:
        assert same(got.flatten(), reference.cast_stochastic(x.flatten(), out_dtype=NAMES[target]))


@pytest.mark.parametrize(("source", "target"), STOCHASTIC)
@pytest.mark.parametrize("value", [0.3, 37.3, -1.07, 0.0029])
def test_stochastic_rounding_is_unbiased(source: torch.dtype, target: torch.dtype, value: float) -> None:
    """Each of the four places of a quad has random bits of its own, so each is looked at."""
    x = torch.full((2**22,), value, device="cuda", dtype=source)
    got = ops.quant.cast(x, target, stochastic_rounding=True).float().double().view(-1, 4)
    below, above = next_towards(x[:1], target)
    deviation = (above - below).item() / 2 / got.shape[0] ** 0.5
    assert ((got.mean(dim=0) - x[0].double()).abs() <= 6 * deviation + 1e-12).all()


def test_stochastic_rounding_of_special_values() -> None:
    x = torch.tensor([float("nan"), float("inf"), -1e9, -0.0, 448.0, 1.0, 0.0, -448.0] * 512, device="cuda")
    codes = ops.quant.cast(x, E4M3, stochastic_rounding=True).view(torch.uint8).view(-1, 8)
    assert codes.unique(dim=0).tolist() == [[0x7F, 0x7E, 0xFE, 0x80, 0x7E, 0x38, 0x00, 0xFE]]
    bits = ops.quant.cast(x, torch.bfloat16, stochastic_rounding=True).view(torch.int16).view(-1, 8)
    assert torch.equal(bits[:, [1, 3, 4, 5, 6, 7]], x.bfloat16().view(torch.int16).view(-1, 8)[:, [1, 3, 4, 5, 6, 7]])
    assert bits.view(torch.bfloat16)[:, 0].isnan().all()


# ---- contract


@pytest.mark.parametrize(
    ("make", "dtype", "stochastic"),
    [
        (lambda x: x.T, torch.bfloat16, False),
        (lambda x: x[:, ::2], torch.bfloat16, False),
        (lambda x: x.cpu(), torch.bfloat16, False),
        (lambda x: x.double(), torch.bfloat16, False),
        (lambda x: x, torch.int8, False),
        (lambda x: x[:, :3].contiguous()[:1], torch.bfloat16, True),
        (lambda x: x.bfloat16(), torch.float32, True),
        (lambda x: x, torch.float16, True),
        (lambda x: x, torch.float32, True),
    ],
)
def test_what_the_contract_excludes_is_refused(make, dtype: torch.dtype, stochastic: bool) -> None:
    x = make(random(64, 128))
    before = native().launch_count()
    with pytest.raises((ArgumentError, NoVariantError)):
        ops.quant.cast(x, dtype, stochastic)
    assert native().launch_count() == before


def test_no_elements_launch_nothing() -> None:
    before = native().launch_count()
    assert ops.quant.cast(torch.empty(3, 0, device="cuda"), E4M3).shape == (3, 0)
    assert ops.quant.cast(torch.empty(0, device="cuda"), E4M3, stochastic_rounding=True).dtype == E4M3
    assert native().launch_count() == before


@pytest.mark.parametrize("op", ["cast", "cast_stochastic"])
def test_opcheck(op: str) -> None:
    opcheck(getattr(torch.ops.tkbuild, op), (random(64),), {"out_dtype": torch.bfloat16})

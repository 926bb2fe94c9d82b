"""The fused inference path on a GPU: bit for bit the chain of its parts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from gpu_checks import on_gpu_with, opcheck, same

from tkbuild import ops, reference
from tkbuild.errors import ArgumentError, NoVariantError
from tkbuild.ops.modeling.mhc import (
    mhc_pre_apply_mix,
    mhc_pre_big_fuse,
    mhc_pre_norm_fn,
    mhc_pre_split_mixes,
    sinkhorn_normalize,
)
from tkbuild.runtime.launcher import native

pytestmark = on_gpu_with("mhc.pre_big_fuse", "mhc.reduce_partials_and_rmsnorm", "mhc.pre_split_mixes", "mhc.pre_apply_mix")

BF16, F32 = torch.bfloat16, torch.float32
VALUES = {"rms_eps": 1e-6, "mhc_pre_eps": 1e-6, "mhc_sinkhorn_eps": 1e-6, "mhc_post_mult_value": 1.0, "sinkhorn_repeat": 10}


def random(*shape: int, dtype: torch.dtype = F32) -> torch.Tensor:
    return torch.randn(shape, device="cuda").to(dtype)


def given(splits: int, n: int, columns: int) -> list[torch.Tensor]:
    squares = random(splits, n).abs() * columns
    return [random(splits, n, 24), squares, random(3), random(24), random(n, 4, columns, dtype=BF16)]


def outputs(n: int, columns: int) -> list[torch.Tensor]:
    sizes = ((n, 4), F32), ((n, 16), F32), ((n, columns), BF16)
    return [torch.full(size, float("nan"), dtype=dtype, device="cuda") for size, dtype in sizes]


def chain(inputs: list[torch.Tensor], values: dict[str, Any]) -> list[torch.Tensor]:
    products, squares, scale, base, residual = inputs
    splits, n, _ = products.shape
    columns = residual.shape[2]
    mixes, post, comb, layer_input = random(n, 24), *outputs(n, columns)
    pre, pre_comb = random(n, 4), random(n, 16)
    sums = random(n, 1, 24), random(n, 1)
    partials = products[:, :, None], squares[:, :, None]
    ops.mhc.mhc_reduce_partials_and_rmsnorm_fwd(*partials, *sums, mixes, 4 * columns, values["rms_eps"], splits)
    ops.mhc.mhc_pre_split_mixes_fwd(mixes, scale, base, pre, post, pre_comb, values["mhc_post_mult_value"], values["mhc_pre_eps"])
    matrices = pre_comb.view(n, 4, 4), comb.view(n, 4, 4)
    ops.mhc.mhc_sinkhorn_fwd(*matrices, values["sinkhorn_repeat"], values["mhc_sinkhorn_eps"])
    ops.mhc.mhc_pre_apply_mix_fwd(residual, pre, layer_input)
    return [post, comb, layer_input]


@pytest.mark.parametrize("n", [1, 15, 64, 512, 1031, 8192])
@pytest.mark.parametrize("columns", [8, 1280, 2560, 7168])
@pytest.mark.parametrize(("splits", "repeat"), [(16, 10), (1, 1), (5, 20)])
def test_bits_are_those_of_the_chain(n: int, columns: int, splits: int, repeat: int) -> None:
    inputs, values = given(splits, n, columns), {**VALUES, "sinkhorn_repeat": repeat, "mhc_post_mult_value": 2.0}
    got = outputs(n, columns)
    ops.mhc.mhc_pre_big_fuse_fwd(*inputs, *got, **values, n_splits=splits)
    assert all(same(a, b) for a, b in zip(got, chain(inputs, values), strict=True))


def test_against_the_reference() -> None:
    inputs, got = given(16, 777, 1280), outputs(777, 1280)
    ops.mhc.mhc_pre_big_fuse_fwd(*inputs, *got, *VALUES.values())
    wanted = reference.mhc.pre_big_fuse(*inputs, **VALUES)
    for ours, theirs, rtol in zip(got, wanted, (2e-5, 2e-5, 8e-3), strict=True):
        torch.testing.assert_close(ours, theirs, atol=rtol, rtol=rtol)


@pytest.mark.parametrize("lead", [(1,), (2, 33), (4096,)])
@pytest.mark.parametrize("columns", [64, 1280])
def test_layer_gives_the_bits_of_the_differentiable_ones(lead: tuple[int, ...], columns: int) -> None:
    residual, fn = random(*lead, 4, columns, dtype=BF16), random(24, 4 * columns) / columns**0.5
    scale, base = random(3), random(24)
    post, comb, layer_input = mhc_pre_big_fuse(residual, fn, scale, base, *VALUES.values())
    mixes = mhc_pre_norm_fn(residual, fn, None, VALUES["rms_eps"])
    pre, wanted_post, wanted_comb = mhc_pre_split_mixes(mixes, scale, base, 4, 1.0, VALUES["mhc_pre_eps"])
    assert same(post, wanted_post)
    assert same(comb, sinkhorn_normalize(wanted_comb, 10, 1e-6))
    assert same(layer_input, mhc_pre_apply_mix(residual, pre))


def test_no_tokens() -> None:
    before = native().launch_count()
    ops.mhc.mhc_pre_big_fuse_fwd(*given(2, 0, 64), *outputs(0, 64), *VALUES.values(), 2)
    assert native().launch_count() == before


def changed(place: int, make: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    tensors = [*given(2, 5, 64), *outputs(5, 64)]
    tensors[place] = make(tensors[place])
    return tensors


@pytest.mark.parametrize(
    ("place", "make"),
    [
        (0, lambda t: t[:, :4]),
        (0, lambda t: t[:, :, :20]),
        (1, lambda t: t[:1]),
        (2, lambda t: t[:2]),
        (3, lambda t: t[:20]),
        (4, lambda t: t.float()),
        (4, lambda t: t[:, :, :60]),
        (4, lambda t: t.transpose(0, 1)),
        (5, lambda t: t[:, :3]),
        (6, lambda t: t[:, :15]),
        (7, lambda t: t.float()),
    ],
)
def test_refusals_launch_nothing(place: int, make: Callable[[torch.Tensor], torch.Tensor]) -> None:
    tensors = changed(place, make)
    before = native().launch_count()
    with pytest.raises((ArgumentError, NoVariantError)):
        ops.mhc.mhc_pre_big_fuse_fwd(*tensors, *VALUES.values(), 2)
    assert native().launch_count() == before


def test_refused_numbers() -> None:
    tensors = [*given(2, 5, 64), *outputs(5, 64)]
    with pytest.raises(ArgumentError, match="n_splits"):
        ops.mhc.mhc_pre_big_fuse_fwd(*tensors, *VALUES.values())
    with pytest.raises(ArgumentError, match="sinkhorn_repeat"):
        ops.mhc.mhc_pre_big_fuse_fwd(*tensors, *{**VALUES, "sinkhorn_repeat": 0}.values(), 2)


def test_torch_op() -> None:
    opcheck(torch.ops.tkbuild.mhc_pre_big_fuse, given(2, 5, 64), VALUES)

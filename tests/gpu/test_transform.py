"""The rotary position embedding on a GPU, against the reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gpu_checks import on_gpu_with, opcheck, same

from tkbuild import ops, reference
from tkbuild.errors import ArgumentError, NoVariantError
from tkbuild.runtime.launcher import native

pytestmark = on_gpu_with("transform.apply_rotary")

BF16, F32 = torch.bfloat16, torch.float32
ROWS = 4096


def random(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.randn(shape, device="cuda").to(dtype)


def cache(width: int) -> torch.Tensor:
    angles = torch.rand(ROWS, width // 2, device="cuda") * 6.3
    return torch.cat((angles.cos(), angles.sin()), dim=1)


def wanted(x: torch.Tensor, angles: torch.Tensor, positions: Any = None, **flags: int) -> torch.Tensor:
    given = {"interleaved": 0, "conjugate": 0, "seqlen_offset": 0, **flags}
    batched, rows = (x, positions) if x.dim() == 4 else (x[None], None if positions is None else positions[None])
    return reference.transform.apply_rotary(batched, angles, rows, **given).view(x.shape)


@pytest.mark.parametrize("dtype", [BF16, F32])
@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("heads", [1, 5, 32, 128])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("conjugate", [False, True])
@pytest.mark.parametrize("position_dtype", [None, torch.int32, torch.int64])
def test_rotation(dtype: torch.dtype, width: int, heads: int, interleaved: bool, conjugate: bool, position_dtype: Any) -> None:
    angles, query, key = cache(width), random(2001, heads, width, dtype=dtype), random(2001, 3, width, dtype=dtype)
    positions = None if position_dtype is None else torch.randint(0, ROWS - 17, (2001,), device="cuda", dtype=position_dtype)
    flags = {"interleaved": int(interleaved), "conjugate": int(conjugate), "seqlen_offset": 17}
    results = [wanted(x, angles, positions, **flags) for x in (query, key)]
    assert ops.transform.apply_rotary(query, angles, key, positions, interleaved, conjugate, 17) is None
    assert same(query, results[0])
    assert same(key, results[1])


@pytest.mark.parametrize("position_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("interleaved", [False, True])
def test_slices_and_broadcast_positions(position_dtype: torch.dtype, interleaved: bool) -> None:
    angles, whole = cache(64), random(3, 2048, 40, 192)
    positions = torch.randint(0, ROWS, (1, 2048), device="cuda", dtype=position_dtype).expand(3, 2048)
    query, before = whole[:, :, 3:35, 128:], whole.clone()
    result = wanted(query, angles, positions, interleaved=int(interleaved))
    ops.transform.apply_rotary(query, angles, positions=positions, interleaved=interleaved)
    assert same(query, result)
    whole[:, :, 3:35, 128:] = before[:, :, 3:35, 128:]
    assert same(whole, before)


def test_positions_beside_the_cache_take_its_nearest_row() -> None:
    angles, query = cache(64), random(4, 2, 64)
    positions = torch.tensor([-7, 0, ROWS - 1, 2**31 - 1], device="cuda")
    result = wanted(query, angles, positions, seqlen_offset=5)
    ops.transform.apply_rotary(query, angles, positions=positions, seqlen_offset=5)
    assert same(query, result)


def test_the_inverse_gives_back_the_input() -> None:
    angles, query = cache(128), random(2, 100, 8, 128, dtype=F32)
    before = query.clone()
    ops.transform.apply_rotary(query, angles, seqlen_offset=17)
    ops.transform.apply_rotary(query, angles, conjugate=True, seqlen_offset=17)
    torch.testing.assert_close(query, before, rtol=1e-5, atol=1e-5)


def test_no_tokens() -> None:
    before = native().launch_count()
    ops.transform.apply_rotary(random(0, 4, 64), cache(64))
    ops.transform.apply_rotary(random(2, 0, 4, 64), cache(64), random(2, 0, 1, 64))
    assert native().launch_count() == before


@pytest.mark.parametrize(
    "call",
    [
        lambda f, q, c: f(q[..., :32], c[:, :32]),
        lambda f, q, c: f(q, c.bfloat16()),
        lambda f, q, c: f(q.half(), c),
        lambda f, q, c: f(q[0, 0], c),
        lambda f, q, c: f(q, cache(128)),
        lambda f, q, c: f(q, c, q[:3].clone()),
        lambda f, q, c: f(q, c, q.float()),
        lambda f, q, c: f(q, c, q[None].clone()),
        lambda f, q, c: f(q, c, random(7, 2, 128)),
        lambda f, q, c: f(q, c, positions=torch.zeros(7, device="cuda")),
        lambda f, q, c: f(q, c, positions=torch.zeros(8, dtype=torch.int32, device="cuda")),
        lambda f, q, c: f(q, c, seqlen_offset=ROWS - 3),
        lambda f, q, c: f(q, c, seqlen_offset=-1),
        lambda f, q, c: f(random(7, 2, 72)[..., 4:68], c),
        lambda f, q, c: f(random(7, 2, 68)[..., :64], c),
        lambda f, q, c: f(q.cpu(), c.cpu()),
    ],
)
def test_refusals_launch_nothing(call: Any) -> None:
    query, angles = random(7, 2, 64), cache(64)
    before = native().launch_count()
    with pytest.raises((ArgumentError, NoVariantError)):
        call(ops.transform.apply_rotary, query, angles)
    assert native().launch_count() == before


def test_opcheck() -> None:
    positions = torch.zeros(1, 7, dtype=torch.int32, device="cuda")
    opcheck(torch.ops.tkbuild.apply_rotary, (random(1, 7, 2, 64), cache(64), positions), {"interleaved": 1})

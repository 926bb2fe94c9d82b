"""The packing of weight scales on a GPU, against its reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gpu_checks import opcheck

from tkbuild import ops
from tkbuild.errors import ArgumentError
from tkbuild.reference import quant as reference
from tkbuild.runtime.launcher import native

pytestmark = pytest.mark.gpu

Pair = tuple[torch.Tensor, torch.Tensor]


def scales(*shape: int) -> torch.Tensor:
    return torch.exp2(torch.randint(-100, 100, shape, device="cuda").float())


def by_reference(sf: torch.Tensor, block: int, turned: bool) -> Pair:
    groups = sf if sf.dim() == 3 else sf[None]
    plain, transposed = reference.weight_sf(groups, block), reference.weight_sf(groups.transpose(1, 2).contiguous(), block)
    pair = plain.transpose(1, 2), transposed if turned else transposed.transpose(1, 2)
    return pair if sf.dim() == 3 else (pair[0][0], pair[1][0])


def check(found: list[Pair], sf: list[torch.Tensor], block: int, turned: list[bool]) -> None:
    for pair, one, flag in zip(found, sf, turned, strict=True):
        for got, wanted in zip(pair, by_reference(one, block, flag), strict=True):
            assert torch.equal(got, wanted)
            assert got.stride()[-2:] == ((got.shape[-1], 1) if flag and got is pair[1] else (1, got.shape[-2]))


@pytest.mark.parametrize(("block", "step"), [(32, 4), (128, 1)])
@pytest.mark.parametrize("count", [1, 2, 33, 70])
def test_many_weights(block: int, step: int, count: int) -> None:
    generator = torch.Generator().manual_seed(count)
    sizes = torch.randint(1, 9, (count, 2), generator=generator).mul(step).tolist()
    sf = [scales(*size) if index % 3 else scales(1 + index % 5, *size) for index, size in enumerate(sizes)]
    turned = [index % 2 == 1 for index in range(count)]
    check(ops.quant.batched_transpose_weight_sf(sf, block, turned), sf, block, turned)


def test_large_weights() -> None:
    sf, turned = [scales(56, 16), scales(64, 16, 56), scales(1, 129)], [False, True, False]
    check(ops.quant.batched_transpose_weight_sf(sf, 128, turned), sf, 128, turned)


def test_given_buffers_and_new_ones() -> None:
    sf, turned = [scales(8, 4), scales(3, 4, 8), scales(5, 6)], [True, False, False]
    outs = ops.quant.batched_transpose_weight_sf([torch.ones_like(one) for one in sf], 128, turned)
    for given in ([outs[0], outs[1], outs[2]], [None, outs[1], None], [outs[0], None, None]):
        found = ops.quant.batched_transpose_weight_sf(sf, 128, turned, given)
        check(found, sf, 128, turned)
        for pair, out in zip(found, given, strict=True):
            assert out is None or [t.data_ptr() for t in pair] == [t.data_ptr() for t in out]


def test_inputs_may_go_away_at_once() -> None:
    sf = [scales(64, 16, 56) for _ in range(8)]
    wanted = [by_reference(one, 128, False) for one in sf]
    found = ops.quant.batched_transpose_weight_sf(sf, 128, [False] * 8)
    del sf
    torch.full((8 * 64 * 16 * 56,), 3.0, device="cuda")
    assert all(torch.equal(a, b) for pair, other in zip(found, wanted, strict=True) for a, b in zip(pair, other, strict=True))


def test_nothing_to_do() -> None:
    before = native().launch_count()
    assert ops.quant.batched_transpose_weight_sf([], 128, []) == []
    found = ops.quant.batched_transpose_weight_sf([scales(0, 4, 4)], 128, [False])
    assert [tuple(t.shape) for t in found[0]] == [(0, 512, 1), (0, 512, 1)]
    assert native().launch_count() == before


@pytest.mark.parametrize(
    "call",
    [
        lambda sf: ops.quant.batched_transpose_weight_sf([sf], 64, [False]),
        lambda sf: ops.quant.batched_transpose_weight_sf([sf], 128, []),
        lambda sf: ops.quant.batched_transpose_weight_sf([sf], 128, [False], []),
        lambda sf: ops.quant.batched_transpose_weight_sf([sf[:, :3]], 128, [False]),
        lambda sf: ops.quant.batched_transpose_weight_sf([sf[:, :3].contiguous()], 32, [False]),
        lambda sf: ops.quant.batched_transpose_weight_sf([sf.double()], 128, [False]),
        lambda sf: ops.quant.batched_transpose_weight_sf([sf[0]], 128, [False]),
        lambda sf: ops.quant.batched_transpose_weight_sf([sf, sf.cpu()], 128, [False] * 2),
        lambda sf: ops.quant.batched_transpose_weight_sf([sf], 128, [False], [by_reference(sf, 128, True)]),
    ],
)
def test_refusals_launch_nothing(call: Any) -> None:
    sf = scales(8, 4)
    before = native().launch_count()
    with pytest.raises(ArgumentError):
        call(sf)
    assert native().launch_count() == before


def test_opcheck() -> None:
    entries = torch.tensor([[0], [0], [8], [4], [1], [0], [1024]], device="cuda")
    args = (scales(8, 4).flatten(), *(row.clone() for row in entries))
    opcheck(torch.ops.tkbuild.batched_transpose_weight_sf, args, {"block": 128, "words": 2048, "tiles": 2})

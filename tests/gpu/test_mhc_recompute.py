"""The streams computed again through layers, on a GPU: bit for bit the chain of their parts."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from gpu_checks import on_gpu_with, opcheck, same

from tkbuild import ops, reference
from tkbuild.errors import ArgumentError
from tkbuild.runtime.launcher import native

pytestmark = on_gpu_with("mhc.multilayer_recompute")

BF16, F32 = torch.bfloat16, torch.float32
Lists = list[list[torch.Tensor]]


def random(*shape: int, dtype: torch.dtype = F32) -> torch.Tensor:
    return torch.randn(shape, device="cuda").to(dtype)


def tensors(layers: int, posts: int, lead: tuple[int, ...], columns: int) -> tuple[torch.Tensor, Lists]:
    """The first residual, and the six lists; the outputs hold NaN."""
    counts = (layers, posts, posts, posts, layers, posts)
    endings = ((4, 1), (columns,), (4, 1), (4, 4), (columns,), (4, columns))
    dtypes = (F32, BF16, F32, F32, BF16, BF16)
    kinds = zip(counts, endings, dtypes, strict=True)
    lists = [[random(*lead, *ending, dtype=dtype) * 0.5 for _ in range(count)] for count, ending, dtype in kinds]
    for out in (*lists[4], *lists[5]):
        out.fill_(float("nan"))
    return random(*lead, 4, columns, dtype=BF16), lists


def chain(initial: torch.Tensor, lists: Lists) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    pre, outputs, post, comb, *_ = lists
    inputs, residuals, streams = [], [], initial
    for layer, mix in enumerate(pre):
        inputs.append(torch.empty_like(streams[..., 0, :]))
        ops.mhc.mhc_pre_apply_mix_fwd(streams, mix, inputs[-1])
        if layer < len(outputs):
            streams = ops.mhc.mhc_post_fwd(outputs[layer], streams, post[layer], comb[layer])
            residuals.append(streams)
    return inputs, residuals


@pytest.mark.parametrize(("layers", "posts"), [(1, 0), (1, 1), (3, 2), (3, 3), (10, 9), (10, 10)])
@pytest.mark.parametrize(("lead", "columns"), [((1,), 8), ((2, 33), 136), ((1000,), 2560), ((512,), 7168)])
def test_bits_are_those_of_the_chain(layers: int, posts: int, lead: tuple[int, ...], columns: int) -> None:
    initial, lists = tensors(layers, posts, lead, columns)
    ops.mhc.mhc_multilayer_recompute(initial, *lists)
    for got, wanted in zip(lists[4:], chain(initial, lists), strict=True):
        assert all(same(a, b) for a, b in zip(got, wanted, strict=True))


def test_against_the_reference() -> None:
    initial, lists = tensors(3, 2, (65,), 512)
    ops.mhc.mhc_multilayer_recompute(initial, *lists)
    stacked = [torch.stack([t.squeeze(-1) if t.shape[-2:] == (4, 1) else t for t in group]) for group in lists]
    wanted = reference.mhc.multilayer_recompute(initial, *stacked, num_layers=3, num_posts=2)
    for got, want in zip(stacked[4:], wanted, strict=True):
        assert same(got, want)


def test_captured_in_a_graph() -> None:
    initial, lists = tensors(3, 3, (64,), 512)
    ops.mhc.mhc_multilayer_recompute(initial, *lists)
    wanted = [t.clone() for t in (*lists[4], *lists[5])]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ops.mhc.mhc_multilayer_recompute(initial, *lists)
    for _ in range(3):
        for out in (*lists[4], *lists[5]):
            out.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        assert all(same(a, b) for a, b in zip((*lists[4], *lists[5]), wanted, strict=True))


def test_under_compile() -> None:
    initial, lists = tensors(3, 2, (33,), 128)
    again = [[t.clone() for t in group] for group in lists]
    torch.compile(ops.mhc.mhc_multilayer_recompute, backend="aot_eager", fullgraph=True)(initial, *lists)
    ops.mhc.mhc_multilayer_recompute(initial, *again)
    for got, wanted in zip(lists[4:], again[4:], strict=True):
        assert all(same(a, b) for a, b in zip(got, wanted, strict=True))


def test_no_tokens() -> None:
    initial, lists = tensors(2, 2, (0,), 64)
    before = native().launch_count()
    ops.mhc.mhc_multilayer_recompute(initial, *lists)
    assert native().launch_count() == before


@pytest.mark.parametrize(
    "spoil",
    [
        lambda lists: lists[0].pop(),
        lambda lists: lists[1].clear(),
        lambda lists: lists[5].pop(),
        lambda lists: lists[0].__setitem__(1, lists[0][1].double()),
        lambda lists: lists[1].__setitem__(1, lists[1][1][:4]),
        lambda lists: lists[3].__setitem__(1, lists[3][1].transpose(1, 2)),
        lambda lists: lists[4].__setitem__(1, lists[4][1].cpu()),
        lambda lists: lists[5].__setitem__(1, random(5, 4, 65, dtype=BF16).flatten()[1 : 5 * 256 + 1].view(5, 4, 64)),
        lambda lists: lists[5].__setitem__(0, lists[5][0].float()),
        lambda lists: [group.clear() for group in lists],
    ],
)
def test_refusals_launch_nothing(spoil: Callable[[Lists], object]) -> None:
    initial, lists = tensors(2, 2, (5,), 64)
    spoil(lists)
    before = native().launch_count()
    with pytest.raises(ArgumentError):
        ops.mhc.mhc_multilayer_recompute(initial, *lists)
    assert native().launch_count() == before


def test_torch_op() -> None:
    initial, lists = tensors(2, 2, (5,), 64)
    mixes = {0: (4,), 2: (4,), 3: (4, 4)}
    stacked = [torch.stack([t.view(5, *mixes.get(place, t.shape[1:])) for t in group]) for place, group in enumerate(lists)]
    stacked[4].zero_()
    stacked[5].zero_()
    opcheck(torch.ops.tkbuild.mhc_multilayer_recompute, (initial, *stacked, None), {"num_layers": 2, "num_posts": 2})

"""The Engram gate's layer without a GPU: references stand in for the kernels, so that what autograd is told can be checked."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from tkbuild import ops
from tkbuild.errors import ArgumentError
from tkbuild.ops import v1
from tkbuild.ops.engram import gate, weights
from tkbuild.reference import engram as reference

HC, H, CLAMP, EPS = 4, 16, 1e-6, 1e-20
BF16 = torch.bfloat16


def gate_fwd(tensors: Any, _static: Any, scalars: Any, outs: Any = None) -> torch.Tensor:
    *statistics, out = reference.gate_fwd(*tensors, eps=scalars[0], clamp_value=scalars[1])
    for place, found in zip([t for t in tensors[5:] if t is not None], statistics, strict=True):
        place.copy_(found)
    return out if outs is None else outs[0].copy_(out)


def gate_bwd(tensors: Any, _static: Any, scalars: Any, outs: Any = None) -> None:
    found = reference.gate_bwd(*tensors, clamp_value=scalars[0], num_partials=outs[-1].shape[0])
    for out, one in zip(outs, found, strict=True):
        out.copy_(one)


def grad_w_reduce(tensors: Any, *_rest: Any) -> None:
    for place, found in zip(tensors[3:], reference.grad_w_reduce(*tensors), strict=True):
        place.copy_(found)


@pytest.fixture(autouse=True)
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate, "_gate_fwd", gate_fwd)
    monkeypatch.setattr(gate, "_gate_bwd", gate_bwd)
    monkeypatch.setattr(weights, "_fused_weight", lambda tensors: reference.fused_weight(*tensors))
    monkeypatch.setattr(weights, "_grad_w_reduce", grad_w_reduce)


def leaves(*lead: int) -> list[torch.Tensor]:
    shapes = [(*lead, HC, H), (*lead, (HC + 1) * H), (HC, H), (HC, H)]
    return [
        torch.randn(shape, generator=torch.Generator().manual_seed(i)).to(BF16).requires_grad_() for i, shape in enumerate(shapes)
    ]


def layer(*tensors: torch.Tensor) -> torch.Tensor:
    return ops.modeling.engram.engram_gate(*tensors, CLAMP, EPS)


def plain(x: torch.Tensor, kv: torch.Tensor, weight_x: torch.Tensor, weight_k: torch.Tensor) -> torch.Tensor:
    keys = kv.unflatten(-1, (HC + 1, H))
    flat = (x.flatten(0, -3), keys[..., :-1, :].flatten(0, -3), keys[..., -1, :].flatten(0, -2), weight_x * weight_k)
    (out,) = reference.gate_fwd(*flat, *[None] * 5, eps=EPS, clamp_value=CLAMP)
    return out.view(x.shape)


@pytest.mark.parametrize("lead", [(5,), (2, 3), (0,), (2, 0)])
def test_gradients(lead: tuple[int, ...]) -> None:
    ours = leaves(*lead)
    theirs = [t.detach().double().requires_grad_() for t in ours]
    out, wanted = layer(*ours), plain(*theirs)
    torch.testing.assert_close(out.double(), wanted, rtol=1e-2, atol=1e-2)
    grad = torch.randn(out.shape).to(BF16)
    out.backward(grad)
    wanted.backward(grad.double())
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one.grad.double(), other.grad, rtol=3e-2, atol=3e-2)


def test_a_checkpoint_recomputes_it() -> None:
    ours, others = leaves(5), leaves(5)
    checkpoint(layer, *ours, use_reentrant=False).float().sum().backward()
    layer(*others).float().sum().backward()
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(ours, others, strict=True))


def test_the_main_grad_of_the_backward_pass_counts() -> None:
    ours, others = leaves(5), leaves(5)
    ours[2].main_grad = torch.zeros(HC, H)  # of a buffer that is replaced
    out = layer(*ours)
    ours[2].main_grad, ours[3].main_grad = torch.ones(HC, H), torch.zeros(HC, H)
    out.float().sum().backward()
    layer(*others).float().sum().backward()
    assert ours[2].grad is None and ours[3].grad is None
    torch.testing.assert_close(ours[2].main_grad - 1, others[2].grad.float(), rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(ours[3].main_grad, others[3].grad.float(), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("given", [(0, (2, 3, H)), (1, (3, 2, (HC + 1) * H)), (1, (2, 3, HC * H)), (1, (6, (HC + 1) * H))])
def test_shapes_that_contradict_each_other(given: tuple[int, tuple[int, ...]]) -> None:
    tensors = leaves(2, 3)
    tensors[given[0]] = torch.zeros(given[1], dtype=BF16)
    with pytest.raises(ArgumentError, match=r"engram_gate: .* has shape .*, expected "):
        layer(*tensors)


def test_masks_and_parts_of_other_shapes() -> None:
    x, kv, *factors = leaves(2, 3)
    with pytest.raises(ArgumentError, match=r"image_token_mask has shape \(3, 2\), expected \(2, 3\)"):
        ops.modeling.engram.engram_gate(x, kv, *factors, CLAMP, EPS, torch.zeros(3, 2, dtype=torch.bool))
    with pytest.raises(ArgumentError, match=r"v has shape \(96,\), expected \(2, 3, 16\)"):
        v1.modeling.engram.engram_gate(x, torch.zeros_like(x), torch.zeros(96, dtype=BF16), *factors, CLAMP, EPS)

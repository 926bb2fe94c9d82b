"""The references of the engram kernels, against values written out by hand."""

from __future__ import annotations

import torch

from tkbuild.reference.engram import fused_weight, grad_w_reduce


def bf16(*rows: list[float]) -> torch.Tensor:
    return torch.tensor(rows).bfloat16()


def reduced(partials: list[float], hidden: float, embed: float, old: float = 0.0) -> tuple[float, float]:
    """The two gradients of a single column."""
    partial = torch.tensor(partials).reshape(-1, 1, 1)
    grad = torch.tensor([[old]])
    of_hidden, of_embed = grad_w_reduce(partial, bf16([hidden]), bf16([embed]), grad, grad)
    assert grad.tolist() == [[old]]
    return of_hidden.item(), of_embed.item()


def test_the_fused_weight_is_the_float32_product() -> None:
    out = fused_weight(bf16([1.5, -2.0], [0.0, 3.0]), bf16([2.0, 0.5], [7.0, -1.0]))
    assert out.dtype == torch.float32
    assert out.tolist() == [[3.0, -1.0], [0.0, -3.0]]


def test_the_fused_weight_is_not_rounded_to_bfloat16() -> None:
    x = 1.0 + 2.0**-7
    assert fused_weight(bf16([x]), bf16([x])).item() == 1.0 + 2.0**-6 + 2.0**-14


def test_each_weight_gets_the_total_times_the_other() -> None:
    assert reduced([1.0, 2.0, 4.0], hidden=3.0, embed=5.0, old=100.0) == (135.0, 121.0)


def test_the_partials_are_added_from_the_first_to_the_last() -> None:
    assert reduced([1e8, 1.0, -1e8], hidden=1.0, embed=1.0) == (0.0, 0.0)
    assert reduced([1e8, -1e8, 1.0], hidden=1.0, embed=1.0) == (1.0, 1.0)


def test_the_product_is_rounded_before_it_is_added() -> None:
    weight = 1.0 + 2.0**-7
    of_hidden, _ = reduced([1.0 + 2.0**-23], hidden=1.0, embed=weight, old=-weight)
    assert of_hidden == 2.0**-23


def test_streams_and_columns_stay_apart() -> None:
    partial = torch.tensor([[[1.0, 2.0], [3.0, 4.0]], [[10.0, 20.0], [30.0, 40.0]]])
    hidden, embed = bf16([1.0, 2.0], [3.0, 4.0]), bf16([5.0, 6.0], [7.0, 8.0])
    of_hidden, of_embed = grad_w_reduce(partial, hidden, embed, torch.zeros(2, 2), torch.ones(2, 2))
    assert of_hidden.tolist() == [[55.0, 132.0], [231.0, 352.0]]
    assert of_embed.tolist() == [[12.0, 45.0], [100.0, 177.0]]


def test_without_partials_the_gradients_stay() -> None:
    assert reduced([], hidden=2.0, embed=3.0, old=4.0) == (4.0, 4.0)

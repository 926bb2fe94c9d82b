"""The references of the Sinkhorn optimiser step, against values written out by hand."""

from __future__ import annotations

import math

import pytest
import torch

from tkbuild.reference.engram import sinkhorn_finalize, sinkhorn_momentum_update, sinkhorn_step, sinkhorn_step_reduce


@pytest.mark.parametrize(("nesterov", "expected"), [(0, 3.5), (1, 4.25)])
def test_the_momentum_of_one_element(nesterov: int, expected: float) -> None:
    grad, momentum = torch.tensor([5.0]), torch.tensor([2.0])
    new, given = sinkhorn_momentum_update(grad, momentum, beta=0.5, complement=0.5, nesterov=nesterov)
    assert new.item() == 3.5
    assert given.item() == expected


def test_the_momentum_is_rounded_only_where_it_is_stored() -> None:
    grad, momentum = torch.tensor([1.0]).bfloat16(), torch.tensor([2.0**-10]).bfloat16()
    new, given = sinkhorn_momentum_update(grad, momentum, beta=0.5, complement=0.5, nesterov=0)
    assert (new.dtype, given.dtype) == (torch.bfloat16, torch.float32)
    assert given.item() == 0.5 + 2.0**-11
    assert new.item() == 0.5


def test_the_momentum_is_a_fused_sum() -> None:
    x = 1 + 2.0**-12
    new, _ = sinkhorn_momentum_update(torch.tensor([-1.0]), torch.tensor([x]), beta=x, complement=1.0, nesterov=0)
    assert new.item() == 2.0**-11 + 2.0**-24


def test_a_step_by_hand() -> None:
    matrix = torch.tensor([[3.0, 2.0], [0.0, 0.0], [1.0, 0.0]], dtype=torch.float64)
    row_scale, col_scale = torch.tensor([2.0, 1.0, 4.0], dtype=torch.float64), torch.tensor([0.5, 1.0], dtype=torch.float64)
    scale, norm, partial = sinkhorn_step(matrix, row_scale, col_scale, eps=0.5, num_partials=2)
    assert norm.tolist() == pytest.approx([5.0, 0.0, 2.0])
    assert scale.tolist() == pytest.approx([2 / 5.5, 2.0, 4 / 2.5])
    assert partial.flatten().tolist() == pytest.approx([(3 / 5.5) ** 2, (4 / 5.5) ** 2, (2 / 2.5) ** 2, 0.0])


def test_partial_sums_without_rows_are_zero() -> None:
    _, _, partial = sinkhorn_step(torch.ones(3, 2), torch.ones(3), torch.ones(2), eps=0.0, num_partials=5)
    torch.testing.assert_close(partial, torch.tensor([0.5, 0.5, 0.5, 0.0, 0.0])[:, None].expand(5, 2))


def test_the_partial_sums_are_added_in_order() -> None:
    big, tiny = 2.0**30, 1.0
    assert sinkhorn_step_reduce(torch.tensor([[big], [tiny], [-big]])).tolist() == [0.0]
    assert sinkhorn_step_reduce(torch.tensor([[big], [-big], [tiny]])).tolist() == [1.0]
    assert sinkhorn_step_reduce(torch.zeros(0, 2)).tolist() == [0.0, 0.0]


def test_rows_are_finished_to_a_norm_of_alpha() -> None:
    generator = torch.Generator().manual_seed(0)
    matrix, row_scale, col_scale = (torch.randn(s, generator=generator).abs() for s in ((7, 16), (7,), (16,)))
    out = sinkhorn_finalize(matrix, row_scale, col_scale, eps=1e-20, alpha=math.sqrt(16))
    torch.testing.assert_close(out.square().sum(-1).sqrt(), torch.full((7,), 4.0))
    torch.testing.assert_close(out * 2, sinkhorn_finalize(matrix, row_scale * 3, col_scale, eps=1e-20, alpha=8.0))

"""The arithmetic of the references, against values worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch

from tkbuild.reference.arithmetic import fma

NAN, INF = math.nan, math.inf


@pytest.mark.parametrize(
    ("a", "b", "c", "wanted"),
    [
        (1 + 2.0**-12, 1 + 2.0**-12, -(1 + 2.0**-11), 2.0**-24),  # 0 if the product were rounded
        (1 + 2.0**-12, 1 + 2.0**-12, 2.0**-80, 1 + 2.0**-11 + 2.0**-23),  # a tie for a sum that was rounded to float64
        (1 + 2.0**-12, 1 + 2.0**-12, -(2.0**-80), 1 + 2.0**-11),
        (1 + 2.0**-12, 1 + 2.0**-12, 0.0, 1 + 2.0**-11),  # a true tie: to even
        (-(1 + 2.0**-12), 1 + 2.0**-12, -(2.0**-80), -(1 + 2.0**-11 + 2.0**-23)),
        (2.0**100, 2.0**100, 0.0, INF),
        (INF, 0.0, 1.0, NAN),
        (INF, 1.0, -INF, NAN),
        (2.0**-100, 2.0**-49, 0.0, 2.0**-149),
        (2.0**-100, 2.0**-50, 2.0**-149, 2.0**-148),  # a tie of subnormals, to even
    ],
)
def test_fma(a: float, b: float, c: float, wanted: float) -> None:
    found = fma(*(torch.tensor([value]) for value in (a, b, c)))
    torch.testing.assert_close(found, torch.tensor([wanted]), rtol=0, atol=0, equal_nan=True)


def test_fma_keeps_the_sign_of_zero() -> None:
    found = fma(torch.tensor([-0.0, -0.0, 1.0]), torch.tensor([1.0, 1.0, 1.0]), torch.tensor([-0.0, 0.0, -1.0]))
    assert [math.copysign(1.0, value) for value in found.tolist()] == [-1.0, 1.0, 1.0]
    assert found.tolist() == [0.0, 0.0, 0.0]

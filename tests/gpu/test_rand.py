"""The random numbers are torch's own, on a GPU."""

from __future__ import annotations

import pytest
import torch
from gpu_checks import same

from tkbuild import ops

pytestmark = pytest.mark.gpu


def test_equal_seeds_give_torchs_numbers() -> None:
    ops.rand.set_seed(7)
    ours = [ops.rand.randn(3, 5), ops.rand.randn((4,), dtype=torch.bfloat16), ops.rand.randn_like(torch.zeros(9, device="cuda"))]
    torch.manual_seed(7)
    theirs = [torch.randn(3, 5, device="cuda"), torch.randn(4, dtype=torch.bfloat16, device="cuda"), torch.randn(9, device="cuda")]
    assert all(same(a, b) for a, b in zip(ours, theirs, strict=True))


def test_a_device_may_be_named() -> None:
    assert ops.rand.randn(2, device="cpu").device.type == "cpu"
    out = torch.empty(2)
    assert ops.rand.randn(2, out=out) is out

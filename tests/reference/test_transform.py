"""The reference of the rotary position embedding, against values written out by hand."""

from __future__ import annotations

import pytest
import torch

from tkbuild.reference.transform import apply_rotary

F64 = torch.float64
PLAIN = {"interleaved": 0, "conjugate": 0, "seqlen_offset": 0}


def cache(rows: int, width: int, dtype: torch.dtype = F64) -> torch.Tensor:
    angles = torch.arange(rows, dtype=F64)[:, None] * torch.arange(1, width // 2 + 1, dtype=F64)
    return torch.cat((angles.cos(), angles.sin()), dim=1).to(dtype)


def quarter_turns(rows: int) -> torch.Tensor:
    """Row r turns by r quarters; d = 4."""
    cos, sin = [1, 0, -1, 0], [0, 1, 0, -1]
    return torch.tensor([[cos[r % 4]] * 2 + [sin[r % 4]] * 2 for r in range(rows)], dtype=F64)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({}, [[1, 2, 3, 4], [-3, -4, 1, 2]]),
        ({"interleaved": 1}, [[1, 2, 3, 4], [-2, 1, -4, 3]]),
        ({"conjugate": 1}, [[1, 2, 3, 4], [3, 4, -1, -2]]),
        ({"seqlen_offset": 1}, [[-3, -4, 1, 2], [-1, -2, -3, -4]]),
    ],
)
def test_quarter_turns(flags: dict[str, int], expected: list[list[float]]) -> None:
    x = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=F64).expand(1, 2, 1, 4)
    assert apply_rotary(x, quarter_turns(4), None, **{**PLAIN, **flags})[0, :, 0].tolist() == expected


def test_positions_choose_the_rows_and_stay_inside_the_cache() -> None:
    x = torch.randn(2, 3, 2, 8, generator=torch.Generator().manual_seed(1), dtype=F64)
    positions = torch.tensor([[4, 0, 2], [-5, 99, 1]], dtype=torch.int32)
    out = apply_rotary(x, cache(6, 8), positions, **{**PLAIN, "seqlen_offset": 1})
    for b, s, row in [(0, 0, 5), (0, 1, 1), (0, 2, 3), (1, 0, 0), (1, 1, 5), (1, 2, 2)]:
        alone = apply_rotary(x[b : b + 1, s : s + 1], cache(6, 8), None, **{**PLAIN, "seqlen_offset": row})
        assert torch.equal(out[b, s], alone[0, 0])


@pytest.mark.parametrize("interleaved", [0, 1])
def test_the_conjugate_turns_back(interleaved: int) -> None:
    x = torch.randn(2, 5, 3, 16, generator=torch.Generator().manual_seed(2), dtype=F64)
    there = apply_rotary(x, cache(9, 16), None, interleaved=interleaved, conjugate=0, seqlen_offset=3)
    back = apply_rotary(there, cache(9, 16), None, interleaved=interleaved, conjugate=1, seqlen_offset=3)
    assert not torch.allclose(there, x)
    torch.testing.assert_close(back, x)


def test_a_sum_is_rounded_once() -> None:
    x = torch.tensor([1 + 2.0**-12, 2.0**-20]).view(1, 1, 1, 2)
    out = apply_rotary(x, torch.tensor([[1 + 2.0**-12, 0.5]]), None, **PLAIN)
    assert out.flatten()[0].item() == torch.tensor((1 + 2.0**-12) ** 2 - 2.0**-21, dtype=F64).float().item()


def test_bfloat16_is_rounded_at_the_end() -> None:
    x = torch.randn(1, 4, 2, 8, generator=torch.Generator().manual_seed(3)).bfloat16()
    out = apply_rotary(x, cache(4, 8, torch.float32), None, **PLAIN)
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, apply_rotary(x.float(), cache(4, 8, torch.float32), None, **PLAIN).bfloat16())


def test_the_gradient_is_the_inverse_rotation() -> None:
    x = torch.randn(1, 3, 2, 8, generator=torch.Generator().manual_seed(4), dtype=F64, requires_grad=True)
    grad = torch.randn(1, 3, 2, 8, generator=torch.Generator().manual_seed(5), dtype=F64)
    (got,) = torch.autograd.grad(apply_rotary(x, cache(3, 8), None, **PLAIN), x, grad)
    torch.testing.assert_close(got, apply_rotary(grad, cache(3, 8), None, **{**PLAIN, "conjugate": 1}))

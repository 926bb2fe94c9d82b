"""shapes: tensors with leading dimensions taken as one are the views that torch would make, or refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tkbuild.errors import ArgumentError
from tkbuild.ops.mhc import mixes
from tkbuild.ops.mhc.shapes import like, matrices, outputs, rows, streams, taken, tokens

WHOLE = torch.arange(2 * 3 * 4 * 16.0).view(2, 3, 4, 16)


def is_view(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.data_ptr() == b.data_ptr() and a.shape == b.shape and torch.equal(a, b)


@pytest.mark.parametrize(
    "tensor",
    [
        WHOLE,
        WHOLE[:, :2],
        WHOLE[:1, :2],
        WHOLE[..., :8],
        WHOLE[:, :, 1:2],
        WHOLE.transpose(0, 1),
        WHOLE[:, :0],
        WHOLE[..., :0],
        WHOLE[0],
        WHOLE[0, 0],
        WHOLE[None, None],
        WHOLE[::2],
        WHOLE.expand(2, 2, 3, 4, 16),
        torch.nn.Parameter(WHOLE),
        torch.nn.Parameter(WHOLE.transpose(0, 1)),
    ],
)
@pytest.mark.parametrize(("fold", "kept"), [(rows, 1), (streams, 2)])
def test_folded_as_torch_would(tensor: torch.Tensor, fold: Callable[..., torch.Tensor], kept: int) -> None:
    try:
        wanted = tensor.view(tensor.shape[: tensor.dim() - kept].numel(), *tensor.shape[tensor.dim() - kept :])
    except RuntimeError:
        with pytest.raises(ArgumentError, match=r"t has shape .* expected leading dimensions that can be viewed as one"):
            fold("k", "t", tensor)
    else:
        got = fold("k", "t", tensor)
        assert is_view(got, wanted)
        assert got.requires_grad == tensor.requires_grad
        assert got.numel() < 2 or all(a == b for n, a, b in zip(got.shape, got.stride(), wanted.stride(), strict=True) if n > 1)


@pytest.mark.parametrize("shape", [(2, 3, 4, 4), (5, 4, 4), (4, 4), (0, 4, 4), (2, 0, 4, 4)])
def test_matrices_and_their_elements(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape)
    assert is_view(matrices("k", "c", x), x.view(-1, 4, 4) if x.numel() else x.view(0, 4, 4))
    assert is_view(tokens("k", "c", x, (4, 4), (16,)), x.view(x.numel() // 16, 16))


@pytest.mark.parametrize("shape", [(2, 3, 4, 1), (2, 3, 4), (6, 4), (4, 1), (4,), (0, 4, 1)])
def test_mixes_with_and_without_a_last_dimension(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape)
    assert is_view(tokens("k", "m", x, (4, 1), (4,)), x.view(x.numel() // 4, 4))


@pytest.mark.parametrize("shape", [(2, 3, 5), (4, 2), (), (2, 4, 4, 1, 1)])
def test_other_shapes_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ArgumentError, match=r"k: m has shape .*, expected \(\.\.\., 4, 1\) or \(\.\.\., 4\)"):
        tokens("k", "m", torch.randn(shape), (4, 1), (4,))
    with pytest.raises(ArgumentError, match=r"k: c has shape .*, expected \(\.\.\., 4, 4\)"):
        matrices("k", "c", torch.randn(shape))


def test_results_take_the_shape_of_a_tensor() -> None:
    x = torch.randn(6, 4, 16)
    assert like(x, x) is x
    assert is_view(like(x, WHOLE), x.view(2, 3, 4, 16))
    assert like(torch.randn(0, 4, 16), WHOLE[:0]).shape == (0, 3, 4, 16)


def test_a_compiled_call_traces_views() -> None:
    def fold(x: torch.Tensor) -> torch.Tensor:
        return like(streams("k", "x", x) * 2, x)

    compiled = torch.compile(fold, backend="eager", fullgraph=True, dynamic=True)
    assert torch.equal(compiled(WHOLE), WHOLE * 2)


def test_taken_leaves_leading_dimensions_to_the_launcher() -> None:
    mix = torch.zeros(2, 3, 4, 1)
    assert taken(tokens, "k", "mix", mix, (4, 1), (4,)) is mix
    assert taken(rows, "k", "x", WHOLE) is WHOLE
    # One token's (m, 1) has as many dimensions as the argument (n, m), which would take it for m tokens.
    assert taken(tokens, "k", "mix", mix[0, 0], (4, 1), (4,)).shape == (1, 4)
    with pytest.raises(ArgumentError, match="expected"):
        taken(tokens, "k", "mix", torch.zeros(3, 2, 2), (4, 1), (4,))


def test_outputs_are_like_their_models() -> None:
    made = outputs(WHOLE.transpose(0, 1), torch.zeros(2, 3, 4, 1))
    assert made is not None
    assert [tuple(out.shape) for out in made] == [(3, 2, 4, 16), (2, 3, 4, 1)]
    assert made[0].is_contiguous()
    assert outputs(WHOLE, torch.zeros(4, 1)) is None


@pytest.mark.parametrize("lead", [(0,), (2, 0), (0, 3)])
def test_sums_over_no_tokens_are_zero(lead: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mixes, "_head_bwd", lambda *_args: None)  # launches nothing without tokens
    grad = torch.zeros(*lead, 4)
    sums = torch.full((5, 1), 9.0), torch.full((5, 4), 9.0)
    mixes.mhc_head_compute_mix_bwd(grad, grad, torch.ones(1), torch.ones(4), grad.clone(), *sums, 5)
    assert not any(part.any() for part in sums)

"""The reference of the streams computed again through layers, against values written out by hand."""

from __future__ import annotations

import torch

from tkbuild.reference.mhc import multilayer_recompute
from tkbuild.reference.mhc.recompute import mixed, updated

BF16 = torch.bfloat16


def test_one_layer_by_hand() -> None:
    streams = torch.tensor([[[1.0], [2.0]]], dtype=BF16)
    pre, post = torch.tensor([[10.0, 100.0]]), torch.tensor([[3.0, 5.0]])
    comb = torch.tensor([[[1.0, 10.0], [100.0, 1000.0]]])  # [in, out]
    output = torch.tensor([[0.5]], dtype=BF16)
    assert mixed(pre, streams).tolist() == [[210.0]]
    # 3 * 0.5 + 1 * 1 + 100 * 2 = 202.5 and 5 * 0.5 + 10 * 1 + 1000 * 2 = 2012.5, rounded to 8 bits
    assert updated(output, streams, post, comb).tolist() == [[[202.0], [2016.0]]]


def test_layers_are_chained_with_rounding() -> None:
    generator = torch.Generator().manual_seed(0)
    layers, posts, tokens, mult, columns = 3, 2, 5, 4, 16
    initial = torch.randn(tokens, mult, columns, generator=generator).bfloat16()
    pre, post = (torch.randn(count, tokens, mult, generator=generator) for count in (layers, posts))
    comb = torch.randn(posts, tokens, mult, mult, generator=generator)
    outputs = torch.randn(posts, tokens, columns, generator=generator).bfloat16()
    inputs = torch.empty(layers, tokens, columns, dtype=BF16)
    residuals = torch.empty(posts, tokens, mult, columns, dtype=BF16)
    got_inputs, got = multilayer_recompute(initial, pre, outputs, post, comb, inputs, residuals, num_layers=layers, num_posts=posts)
    streams = initial
    for layer in range(layers):
        assert torch.equal(got_inputs[layer], mixed(pre[layer], streams))
        if layer < posts:
            streams = updated(outputs[layer], streams, post[layer], comb[layer])
            assert torch.equal(got[layer], streams)


def test_one_layer_without_output() -> None:
    initial = torch.ones(2, 4, 8, dtype=BF16)
    pre, inputs = torch.full((1, 2, 4), 0.25), torch.empty(1, 2, 8, dtype=BF16)
    (got,) = multilayer_recompute(initial, pre, None, None, None, inputs, None, num_layers=1, num_posts=0)
    assert torch.equal(got, torch.ones_like(inputs))


def test_sums_are_fused() -> None:
    # Rounded by itself, the square of 1 + 2**-12 would lose 2**-24.
    a = 1.0 + 2.0**-12
    assert mixed(torch.tensor([[1.0, a]]), torch.tensor([[[-1.0], [a]]])).item() == 2.0**-11 + 2.0**-24

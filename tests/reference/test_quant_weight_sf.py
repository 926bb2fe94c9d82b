"""The references of the packing of weight scales against bytes laid out by hand."""

from __future__ import annotations

import torch

from tkbuild.reference import quant


def scales(*shape: int) -> torch.Tensor:
    """Powers of two whose exponent fields count up from 100."""
    count = torch.arange(100, 100 + torch.Size(shape).numel(), dtype=torch.int32)
    return (count << 23).view(torch.float32).view(shape)


def bytes_of(words: torch.Tensor) -> torch.Tensor:
    return words.contiguous().view(torch.uint8).view(*words.shape, 4)


def test_every_row_has_the_exponents_of_its_block_row() -> None:
    words = quant.weight_sf(scales(2, 3, 5), 4)
    assert (words.dtype, words.shape, words.is_contiguous()) == (torch.int32, (2, 2, 12), True)
    stored = bytes_of(words)
    for group in range(2):
        for row in range(12):
            for column in range(8):
                wanted = 100 + 15 * group + 5 * (row // 4) + column if column < 5 else 0
                assert stored[group, column // 4, row, column % 4] == wanted


def test_signs_and_mantissas_do_not_count() -> None:
    words = quant.weight_sf(torch.tensor([[[-1.5, 0.0, 1e-40, float("nan")]]]), 1)
    assert words.tolist() == [[[(127 | 255 << 24) - 2**32]]]


def test_many_weights_in_a_pool() -> None:
    sf = scales(30)
    ints = torch.tensor([[0, 2], [6, 0], [2, 3], [4, 2], [3, 1], [0, 144], [24, 156]])  # a tensor of its own for each row
    pool = quant.batched_transpose_weight_sf(sf, *ints.unbind(), block=4, words=172, tiles=4)
    first, second = sf[6:30].view(3, 2, 4), sf[:6].view(1, 3, 2)
    assert torch.equal(pool[:24].view(3, 1, 8), quant.weight_sf(first, 4))
    assert torch.equal(pool[24:72].view(3, 1, 16), quant.weight_sf(first.transpose(1, 2).contiguous(), 4))
    assert torch.equal(pool[144:156].view(1, 1, 12), quant.weight_sf(second, 4))
    assert torch.equal(pool[156:164].view(1, 1, 8), quant.weight_sf(second.transpose(1, 2).contiguous(), 4))

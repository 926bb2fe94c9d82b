"""The reference of the hashed n-gram indices, against values written out by hand."""

from __future__ import annotations

import torch

from tkbuild.reference.engram import ngram_hash


def i32(values: object) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def test_two_tokens_by_hand() -> None:
    ids, multipliers = i32([[5, 3, 2], [1, 0, 7]]), torch.tensor([[10, 7, 11]])
    sizes, offsets = i32([[[13, 17], [19, 23]]]), i32([[0, 100, 200, 300]])
    pairs, triples = [50 ^ 21, 10 ^ 0], [50 ^ 21 ^ 22, 10 ^ 0 ^ 77]
    wanted = [[p % 13, 100 + p % 17, 200 + t % 19, 300 + t % 23] for p, t in zip(pairs, triples, strict=True)]
    result = ngram_hash(ids, multipliers, sizes, offsets, None)
    assert result.dtype == torch.int32
    assert result.tolist() == [wanted]
    masked = ngram_hash(ids, multipliers, sizes, offsets, torch.tensor([False, True]))
    assert masked.tolist() == [[wanted[0], [-1] * 4]]


def test_products_wrap_and_the_modulus_is_not_negative() -> None:
    ids, multipliers = i32([[3, -1], [2, 5]]), torch.tensor([[2**62, 12345], [-(2**63), -1]])
    sizes, offsets = i32([[[1000]], [[999]]]), i32([[0], [7]])

    def wrapped(value: int) -> int:
        return (value + 2**63) % 2**64 - 2**63

    wanted = [
        [[(wrapped(a * m[0]) ^ wrapped(b * m[1])) % size + offset] for a, b in ids.tolist()]
        for m, size, offset in zip(multipliers.tolist(), (1000, 999), (0, 7), strict=True)
    ]
    assert ngram_hash(ids, multipliers, sizes, offsets, None).tolist() == wanted


def test_no_tokens() -> None:
    result = ngram_hash(
        torch.zeros(0, 3, dtype=torch.int32),
        torch.ones(2, 3, dtype=torch.int64),
        torch.ones(2, 2, 8, dtype=torch.int32),
        i32([[0] * 16] * 2),
        None,
    )
    assert result.shape == (2, 0, 16)

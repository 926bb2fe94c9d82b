"""Hashed n-gram indices, contract of release 1.0."""

from __future__ import annotations

import torch

from tkbuild.ops import engram


def engram_hash(
    ngram_token_ids: torch.Tensor, multipliers: torch.Tensor, vocab_sizes: torch.Tensor, offsets: torch.Tensor
) -> torch.Tensor:
    """Return the rows of the embedding tables that the n-grams of every token hash to. See ``tkbuild.ops.engram.engram_hash``."""
    return engram.engram_hash(ngram_token_ids, multipliers, vocab_sizes, offsets)

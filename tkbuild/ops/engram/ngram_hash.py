"""Hashed n-gram indices."""

from __future__ import annotations

import torch

from tkbuild.runtime.op import kernel_op

__all__ = ["engram_hash", "make_offsets"]

_ngram_hash = kernel_op("engram.ngram_hash")


def engram_hash(
    ngram_token_ids: torch.Tensor,
    multipliers: torch.Tensor,
    vocab_sizes: torch.Tensor,
    offsets: torch.Tensor,
    image_token_mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the rows of the embedding tables that the n-grams of every token hash to.

    h_g = xor of id_i * multipliers[l, i] over i = 0..g, in wrapping 64-bit integers; the index of table j for the first g + 1 ids is
    h_g modulo vocab_sizes[l, g - 1, j], not negative, plus the table's offset. Image tokens have -1 everywhere.

    Shapes: ngram_token_ids (T, n), the ids of a token's window; multipliers (L, n); vocab_sizes (L, n - 1, J), at least 1 each;
    offsets (L, (n - 1) * J); image_token_mask (T) -> (L, T, (n - 1) * J). T may be 0.
    Dtypes: multipliers int64, image_token_mask bool, the others int32.  Layout: contiguous.
    Raises: ArgumentError, NoVariantError, LaunchError.
    """
    result: torch.Tensor = _ngram_hash((ngram_token_ids, multipliers, vocab_sizes, offsets, image_token_mask))
    return result


def make_offsets(vocab_sizes: torch.Tensor) -> torch.Tensor:
    """Return where each table of a layer begins when they lie one behind the other, for ``engram_hash``.

    Shapes: vocab_sizes (L, n - 1, J) -> (L, (n - 1) * J).  Dtypes: int32.  Any device; no kernel of this package.
    """
    sizes = vocab_sizes.flatten(1).long()
    return (sizes.cumsum(1) - sizes).to(torch.int32)

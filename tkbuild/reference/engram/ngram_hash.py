"""Reference of the hashed n-gram indices."""

from __future__ import annotations

import torch


def ngram_hash(
    ngram_token_ids: torch.Tensor,
    multipliers: torch.Tensor,
    vocab_sizes: torch.Tensor,
    offsets: torch.Tensor,
    image_token_mask: torch.Tensor | None,
) -> torch.Tensor:
    """Return the rows of the embedding tables that the n-grams of every token hash to.

    h_g = xor of id_i * multiplier[l, i] over i = 0..g, in wrapping 64-bit integers; the index of table j for g + 1 ids is
    h_g modulo vocab_sizes[l, g - 1, j], not negative, plus the table's offset. Image tokens have -1 everywhere.

    Shapes: ngram_token_ids (T, n); multipliers (L, n); vocab_sizes (L, n - 1, J); offsets (L, (n - 1) * J); image_token_mask (T);
    result (L, T, (n - 1) * J).  Dtypes: multipliers int64, mask bool, everything else int32.
    """
    num_layers, num_grams, num_tables = vocab_sizes.shape
    products = ngram_token_ids.long()[None] * multipliers[:, None, :]
    value, indices = products[..., 0], []
    for gram in range(num_grams):
        value = value ^ products[..., gram + 1]
        indices.append(torch.remainder(value[..., None], vocab_sizes[:, None, gram].long()))
    shape = (num_layers, ngram_token_ids.shape[0], num_grams * num_tables)
    result = (torch.cat(indices, dim=-1) if indices else products.new_zeros(shape)) + offsets[:, None]
    if image_token_mask is not None:
        result = torch.where(image_token_mask[None, :, None], -1, result)
    return result.int()

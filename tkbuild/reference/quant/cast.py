"""References of the element-wise casts."""

from __future__ import annotations

import torch

from tkbuild.reference.quant.rules import canonical_nan, round_to_e4m3
from tkbuild.reference.quant.stochastic import (
    QUAD,
    random_bits_of_four,
    random_bits_of_two,
    random_words,
    stochastic_bf16,
    stochastic_e4m3,
)

_F16_NAN = 0x7FFF
#: The stochastic cast works on this many elements at a time, since it needs many times their memory.
_CHUNK_ELEMS = 2**26


def cast(x: torch.Tensor, *, out_dtype: str) -> torch.Tensor:
    """Return ``x`` (n,) in ``out_dtype``: nearest even, e4m3 saturating at +-448.

    Dtypes: float32, bfloat16, float16, float8_e4m3fn, by torch's names. NaN becomes 0x7F in e4m3 and otherwise has all bits of
    exponent and mantissa set and no sign, but keeps its bits from bfloat16 to float32.
    """
    if out_dtype == "float8_e4m3fn":
        return round_to_e4m3(x.float())
    if out_dtype == "float16":
        result = x.float().half()
        return result.view(torch.int16).masked_fill(result.isnan(), _F16_NAN).view(torch.float16)
    result = x.to(getattr(torch, out_dtype))
    return result if x.dtype == torch.bfloat16 else canonical_nan(result)


def cast_stochastic(x: torch.Tensor, *, out_dtype: str) -> torch.Tensor:
    """Return ``x`` (n,), n a multiple of 4, rounded stochastically to ``out_dtype``, 'bfloat16' or 'float8_e4m3fn'.

    The random bits are hashes of four neighbouring values and their place, so that equal inputs give equal results.
    """
    out = torch.empty(x.shape, dtype=getattr(torch, out_dtype), device=x.device)
    for start in range(0, x.numel(), _CHUNK_ELEMS):
        part = slice(start, start + _CHUNK_ELEMS)
        out[part] = _cast_chunk(x[part].float().view(-1, QUAD), start // QUAD, out.dtype)
    return out


def _cast_chunk(quads: torch.Tensor, first: int, dtype: torch.dtype) -> torch.Tensor:
    indices = torch.arange(first, first + quads.shape[0], device=quads.device)
    words = random_words(quads, indices)
    if dtype == torch.bfloat16:
        return stochastic_bf16(quads, torch.cat([random_bits_of_two(word) for word in words], dim=1)).flatten()
    return stochastic_e4m3(quads, random_bits_of_four(words[0])).flatten()

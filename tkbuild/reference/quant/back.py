"""References of the casts back from quantised formats."""

from __future__ import annotations

import torch

from tkbuild.reference.quant.rules import canonical_nan, e2m1_values, expand, given_scales, scale_values, unpack_e2m1

_GROUP_BYTES = 12
_CODE_BITS = 12
_WORD_MASK = 0xFFFFFFFF


def cast_back(
    data: torch.Tensor,
    sf: torch.Tensor | None,
    sf_packed: torch.Tensor | None = None,
    sf_e4m3: torch.Tensor | None = None,
    *,
    out_dtype: str,
    bm: int,
    bk: int,
    token_packed: int = 0,
) -> torch.Tensor:
    """Return data * sf, each sf covering ``bm`` rows and ``bk`` columns: rounded to float32, then to ``out_dtype``.

    Shapes: data (T, H), e2m1 (T, H / 2), e5m6 (T, 3 H / 2); sf (ceil(T / bm), ceil(H / bk)), packed words (.., ceil(H / bk / 4)),
    with ``token_packed`` (ceil(T / bm / 4), H); any strides.
    Dtypes: data float8_e4m3fn, int8 of two e2m1 or uint8 of e5m6; sf float32, float8_e4m3fn or int32 of packed ue8m0, as any
    one of the three arguments; out_dtype 'bfloat16' or 'float32'. NaN results have all bits of exponent and mantissa set and no sign, as those of the GPU.
    """
    values = data_values(data)
    given = given_scales(sf, sf_packed, sf_e4m3)
    scale = scale_values(given.T).T if token_packed else scale_values(given)
    product = values * expand(scale, bm, bk, values.shape)
    return canonical_nan(product.to(getattr(torch, out_dtype)))


def data_values(data: torch.Tensor) -> torch.Tensor:
    """Return the float32 values (T, H) of quantised ``data``, whose dtype says the format: see ``cast_back``."""
    if data.dtype == torch.int8:
        return e2m1_values(unpack_e2m1(data))
    if data.dtype == torch.uint8:
        return e5m6_values(data)
    return data.float()


def e5m6_values(data: torch.Tensor) -> torch.Tensor:
    """Return the float32 values (T, H) of e5m6 ``data`` (T, 3 H / 2) uint8: codes are the upper 12 bits of a float16.

    Eight codes are three little-endian words; the first code has the highest bits of the first word.
    """
    rows, width = data.shape
    groups = data.contiguous().view(data.numel() // _GROUP_BYTES, _GROUP_BYTES)
    words = torch.nn.functional.pad(groups.view(torch.int32).to(torch.int64) & _WORD_MASK, (0, 1))
    codes = []
    for bit in range(0, 8 * _GROUP_BYTES, _CODE_BITS):
        word, offset = divmod(bit, 32)
        pair = (words[:, word] & _WORD_MASK >> offset) << 32 | words[:, word + 1]
        codes.append((pair >> (64 - offset - _CODE_BITS)).to(torch.int16) << (16 - _CODE_BITS))
    return torch.stack(codes, dim=1).view(torch.float16).float().view(rows, width * 8 // _CODE_BITS)

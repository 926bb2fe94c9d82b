"""References of the casts back from quantised formats."""

from __future__ import annotations

import torch

from tkbuild.reference.quant.rules import canonical_nan, expand, ue8m0_value, unpack_ue8m0


def cast_back(data: torch.Tensor, sf: torch.Tensor, *, out_dtype: str, bm: int, bk: int) -> torch.Tensor:
    """Return data * sf, each sf covering ``bm`` rows and ``bk`` columns: rounded to float32, then to ``out_dtype``.

    Shapes: data (T, H), sf (ceil(T / bm), ceil(H / bk)), packed words (.., ceil(H / bk / 4)); any strides.
    Dtypes: data float8_e4m3fn; sf float32 or int32 of packed ue8m0; out_dtype 'bfloat16' or 'float32'. NaN results have
    all bits of exponent and mantissa set and no sign, as those of the GPU.
    """
    scale = ue8m0_value(unpack_ue8m0(sf)) if sf.dtype == torch.int32 else sf
    product = data.float() * expand(scale, bm, bk, data.shape)
    return canonical_nan(product.to(getattr(torch, out_dtype)))

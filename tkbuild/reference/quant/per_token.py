"""References of the casts of rows in blocks of columns."""

from __future__ import annotations

from typing import NamedTuple

import torch

from tkbuild.reference.quant.back import data_values
from tkbuild.reference.quant.rules import (
    E2M1_MAX,
    E4M3_MAX,
    block_amax,
    canonical_nan,
    column_major,
    expand,
    given_scales,
    pack_e2m1,
    pack_ue8m0,
    round_to_e2m1,
    round_to_e4m3,
    scale_values,
    scales,
)
from tkbuild.reference.quant.stochastic import QUAD, random_bits_of_four, random_words, stochastic_e2m1, stochastic_e4m3

_LARGEST = {"e4m3": E4M3_MAX, "e2m1": E2M1_MAX}
#: The stochastic cast rounds this many elements at a time, or one row, since it needs many times their memory.
_CHUNK_ELEMS = 2**26


class _Scales(NamedTuple):
    stored: torch.Tensor  # as the sf tensor has them, row-major
    sf: torch.Tensor  # the factor that undoes the cast, float32
    inv: torch.Tensor  # the factor of the cast, float32


def per_token_cast(
    x: torch.Tensor,
    *,
    block: int,
    sf_format: str,
    round_sf: int,
    amax_min: float,
    col_major: bool,
    fmt: str = "e4m3",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise each row in blocks of ``block`` columns; return (data, sf).

    sf_format 'f32': one float for each block; 'ue8m0': four exponent bytes to an int32, always rounded, 0 behind the last
    block; 'e4m3': the scale rounded to e4m3, at least the smallest number above 0, never rounded to a power of two.
    A NaN element becomes 0x7F in e4m3 and +6 in e2m1, and does not enter the scale. An infinite element makes sf infinite
    (byte 255, NaN) and the block's codes 0, but its own that of NaN; other blocks do not change. e4m3 scales saturate: there
    an infinite element is like a large one.

    Shapes: x (T, H) -> data (T, H), in e2m1 (T, H / 2); sf (T, ceil(H / block)), packed (T, ceil(H / block / 4)).
    Dtypes: x bfloat16 or float32; data float8_e4m3fn, or int8 of two e2m1 codes; sf float32, int32 or float8_e4m3fn.
    Layout: data contiguous; sf row-major, or with ``col_major`` each column a multiple of 16 bytes.
    """
    values = x.float()
    made = _scales(block_amax(values, 1, block), amax_min, _LARGEST[fmt], sf_format, bool(round_sf))
    data = _codes(values * expand(made.inv, 1, block, values.shape), fmt)
    return data, _laid_out(made.stored, col_major)


def per_token_cast_stochastic(
    x: torch.Tensor,
    *,
    fmt: str,
    sf_format: str,
    col_major: bool,
    block: int,
    round_sf: int,
    amax_min: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise as ``per_token_cast`` does, but round each product of element and factor stochastically; return (data, sf).

    The random bits are hashes of four neighbouring products and their column / 4, so that equal rows give equal results.
    """
    values = x.float()
    made = _scales(block_amax(values, 1, block), amax_min, _LARGEST[fmt], sf_format, bool(round_sf))
    products = canonical_nan(values * expand(made.inv, 1, block, values.shape))
    rows = max(1, _CHUNK_ELEMS // max(1, x.shape[1]))
    data = torch.cat([_stochastic_codes(part, fmt) for part in products.split(rows)])
    return data, _laid_out(made.stored, col_major)


def per_token_cast_with_sf_only(
    x: torch.Tensor, *, sf_format: str, col_major: bool, block: int, round_sf: int, amax_min: float, largest: float
) -> torch.Tensor:
    """Return the sf of ``per_token_cast`` to a format whose greatest value is ``largest``."""
    made = _scales(block_amax(x.float(), 1, block), amax_min, largest, sf_format, bool(round_sf))
    return _laid_out(made.stored, col_major)


def per_token_cast_with_precomputed_sf(
    x: torch.Tensor, sf: torch.Tensor | None, sf_e4m3: torch.Tensor | None = None, *, fmt: str, block: int
) -> torch.Tensor:
    """Return the codes of x times 1 / sf, the quotient rounded to float32; products saturate.

    Shapes: x (T, H), sf (T, ceil(H / block)), any strides. Dtypes: x bfloat16 or float32, sf float32 or float8_e4m3fn, as either
    of the two arguments.
    """
    scale = given_scales(sf, sf_e4m3).float()
    inv = torch.ones_like(scale) / scale
    return _codes(x.float() * expand(inv, 1, block, x.shape), fmt)


def per_token_cast_and_cast_back(
    x: torch.Tensor, *, fmt: str, block: int, round_sf: int, e4m3_sf: int, amax_min: float
) -> torch.Tensor:
    """Return x as it comes back from ``per_token_cast``: each code times its sf, rounded to x's dtype.

    Shapes: x (T, H), bfloat16 or float32. NaN results have all bits of exponent and mantissa set and no sign.
    """
    values = x.float()
    made = _scales(block_amax(values, 1, block), amax_min, _LARGEST[fmt], "e4m3" if e4m3_sf else "f32", bool(round_sf))
    codes = _codes(values * expand(made.inv, 1, block, x.shape), fmt)
    return canonical_nan((data_values(codes) * expand(made.sf, 1, block, x.shape)).to(x.dtype))


def per_token_recast(
    x: torch.Tensor,
    x_sf: torch.Tensor | None,
    x_sf_packed: torch.Tensor | None = None,
    x_sf_e4m3: torch.Tensor | None = None,
    *,
    fmt: str,
    sf_format: str,
    col_major: bool,
    xm: int,
    xk: int,
    block: int,
    round_sf: int,
    amax_min: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise the values x times x_sf as ``per_token_cast`` does; each x_sf covers ``xm`` rows and ``xk`` columns.

    The abs-max is that of the products, rounded to float32. An element is multiplied once, by the product of x_sf and inv.

    Shapes: x (T, H), in e2m1 (T, H / 2); x_sf (ceil(T / xm), ceil(H / xk)), packed words a quarter of the columns.
    Dtypes: x float8_e4m3fn, or int8 of two e2m1 codes; x_sf float32, int32 of packed ue8m0, or float8_e4m3fn, as any
    one of the three arguments; any strides.
    """
    values, given = data_values(x), given_scales(x_sf, x_sf_packed, x_sf_e4m3)
    x_scale = expand(scale_values(given), xm, xk, values.shape)
    made = _scales(block_amax(values * x_scale, 1, block), amax_min, _LARGEST[fmt], sf_format, bool(round_sf))
    data = _codes(values * (x_scale * expand(made.inv, 1, block, values.shape)), fmt)
    return data, _laid_out(made.stored, col_major)


def _scales(amax: torch.Tensor, amax_min: float, largest: float, sf_format: str, rounded: bool) -> _Scales:
    if sf_format == "e4m3":
        return _e4m3_scales(amax, amax_min, largest)
    fields, sf, inv = scales(amax, amax_min, rounded=rounded or sf_format == "ue8m0", largest=largest)
    return _Scales(pack_ue8m0(fields) if sf_format == "ue8m0" else sf, sf, inv)


def _e4m3_scales(amax: torch.Tensor, amax_min: float, largest: float) -> _Scales:
    a = amax.clamp(min=amax_min)
    codes = round_to_e4m3(a / torch.full_like(a, largest)).view(torch.uint8).clamp(min=1)
    stored = codes.view(torch.float8_e4m3fn)
    sf = stored.float()
    return _Scales(stored, sf, torch.ones_like(sf) / sf)


def _codes(values: torch.Tensor, fmt: str) -> torch.Tensor:
    return round_to_e4m3(values) if fmt == "e4m3" else pack_e2m1(round_to_e2m1(values))


def _stochastic_codes(products: torch.Tensor, fmt: str) -> torch.Tensor:
    quads = products.unflatten(1, (-1, QUAD))
    columns = torch.arange(quads.shape[1], device=products.device)
    random = random_bits_of_four(random_words(quads, columns)[0])
    if fmt == "e4m3":
        return stochastic_e4m3(quads, random).flatten(1)
    return pack_e2m1(stochastic_e2m1(quads, random).flatten(1))


def _laid_out(sf: torch.Tensor, col_major: bool) -> torch.Tensor:
    return column_major(sf) if col_major else sf

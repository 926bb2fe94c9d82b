"""References of the quantisation kernels, and the rules they share: scales, e4m3 rounding, layouts of scale factors.

Every quotient is one of two tensors: torch on CUDA turns a division by a Python number into a multiplication by its
reciprocal, which rounds differently.
"""

from __future__ import annotations

import torch

E4M3_MAX = 448.0
NAN_EXPONENT = 255
"""Exponent field of infinity and NaN: as a ue8m0 byte NaN, as the bits of a float32 infinity."""

_MANTISSA_BITS = 23
_MANTISSA_MASK = (1 << _MANTISSA_BITS) - 1
_E4M3_NAN = 0x7F
_BYTES_PER_WORD = 4
_COLUMN_ALIGNMENT = 4
_SMALLEST_UE8M0_BITS = 0x00400000
_CANONICAL_NAN = {torch.float32: (torch.int32, 0x7FFFFFFF), torch.bfloat16: (torch.int16, 0x7FFF)}


def per_token_cast(
    x: torch.Tensor, *, block: int, sf_format: str, round_sf: int, amax_min: float, col_major: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise each row in blocks of ``block`` columns; return (data, sf).

    sf_format 'f32': one float for each block; 'ue8m0': four exponent bytes to an int32, always rounded, 0 behind the last
    block. A NaN element becomes the code 0x7F and does not enter the scale. An infinite element makes sf infinite (byte
    255, NaN) and the block's codes 0, but its own 0x7F; other blocks do not change.

    Shapes: x (T, H) -> data (T, H), sf (T, ceil(H / block)), packed (T, ceil(H / block / 4)).
    Dtypes: x bfloat16 or float32; data float8_e4m3fn; sf float32 or int32.
    Layout: data contiguous; sf row-major, or with ``col_major`` strides (1, T rounded up to 4).
    """
    packed = sf_format == "ue8m0"
    values = x.float()
    fields, sf, inv = scales(block_amax(values, block), amax_min, rounded=packed or bool(round_sf))
    data = round_to_e4m3(values * expand(inv, 1, block, x.shape))
    sf = pack_ue8m0(fields) if packed else sf
    return data, column_major(sf) if col_major else sf


def cast_back(data: torch.Tensor, sf: torch.Tensor, *, out_dtype: str, bm: int, bk: int) -> torch.Tensor:
    """Return data * sf, each sf covering ``bm`` rows and ``bk`` columns: rounded to float32, then to ``out_dtype``.

    Shapes: data (T, H), sf (ceil(T / bm), ceil(H / bk)), packed words (.., ceil(H / bk / 4)); any strides.
    Dtypes: data float8_e4m3fn; sf float32 or int32 of packed ue8m0; out_dtype 'bfloat16' or 'float32'. NaN results have
    all bits of exponent and mantissa set and no sign, as those of the GPU.
    """
    scale = ue8m0_value(unpack_ue8m0(sf)) if sf.dtype == torch.int32 else sf
    product = data.float() * expand(scale, bm, bk, data.shape)
    return canonical_nan(product.to(getattr(torch, out_dtype)))


def block_amax(values: torch.Tensor, block: int) -> torch.Tensor:
    """Return the largest absolute value of each 1 x ``block`` block, NaN elements ignored; 0 where there are no others.

    Shapes: values (T, H) float32 -> (T, ceil(H / block)); the last block may be short.
    """
    rows, columns = values.shape
    magnitudes = torch.where(values.isnan(), 0.0, values.abs())
    padded = torch.nn.functional.pad(magnitudes, (0, -columns % block))
    return padded.view(rows, -(-columns // block), block).amax(dim=2)


def scales(amax: torch.Tensor, amax_min: float, *, rounded: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (exponent fields, sf, inv) of blocks whose largest absolute values are ``amax`` (float32, any shape).

    With a = max(amax, amax_min): sf = a / 448 and inv = 448 / a, each rounded once. ``rounded``: sf is the smallest normal
    power of two that is not below a / 448, inv its reciprocal; for an infinite a, sf is infinite and inv 0.
    The fields (int32) are those of the rounded scale in either case.
    """
    a = amax.clamp(min=amax_min)
    largest = torch.full_like(a, E4M3_MAX)
    quotient = a / largest
    fields = exponent_fields(quotient)
    if not rounded:
        return fields, quotient, largest / a
    return fields, power_of_two(fields), power_of_two((2 * 127 - fields).clamp(min=0))


def exponent_fields(quotient: torch.Tensor) -> torch.Tensor:
    """Return the exponent field (int32) of the smallest normal power of two not below ``quotient`` (float32, >= 0)."""
    return ((quotient.view(torch.int32) + _MANTISSA_MASK) >> _MANTISSA_BITS).clamp(min=1)


def power_of_two(fields: torch.Tensor) -> torch.Tensor:
    """Return 2**(field - 127) as float32, made from bits: field 0 gives 0, field 255 infinity."""
    return (fields << _MANTISSA_BITS).view(torch.float32)


def ue8m0_value(fields: torch.Tensor) -> torch.Tensor:
    """Return what the ue8m0 bytes ``fields`` (int32, 0 to 255) stand for: 2**(byte - 127), NaN for 255."""
    values = torch.where(fields == 0, _SMALLEST_UE8M0_BITS, fields << _MANTISSA_BITS).view(torch.float32)
    return torch.where(fields == NAN_EXPONENT, torch.nan, values)


def pack_ue8m0(fields: torch.Tensor) -> torch.Tensor:
    """Pack exponent fields along the rows, column j in byte j % 4 of word j // 4; missing bytes are 0.

    Shapes: fields (R, C) int32 -> (R, ceil(C / 4)) int32, row-major.
    """
    padded = torch.nn.functional.pad(fields, (0, -fields.shape[1] % _BYTES_PER_WORD))
    return padded.to(torch.uint8).view(torch.int32)


def unpack_ue8m0(words: torch.Tensor) -> torch.Tensor:
    """Return the bytes of packed words as int32. Shapes: words (R, W) int32, any strides -> (R, 4 W)."""
    return torch.stack([(words >> 8 * byte) & 0xFF for byte in range(_BYTES_PER_WORD)], dim=2).flatten(1)


def expand(scale: torch.Tensor, bm: int, bk: int, shape: tuple[int, ...]) -> torch.Tensor:
    """Return for each element of a (T, H) ``shape`` the scale of its block of ``bm`` rows and ``bk`` columns."""
    rows = torch.arange(shape[0], device=scale.device) // bm
    columns = torch.arange(shape[1], device=scale.device) // bk
    return scale[rows][:, columns]


def round_to_e4m3(values: torch.Tensor) -> torch.Tensor:
    """Return ``values`` (float32) as float8_e4m3fn: nearest even, saturating at +-448; every NaN becomes the code 0x7F."""
    codes = values.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    return codes.view(torch.uint8).masked_fill(values.isnan(), _E4M3_NAN).view(torch.float8_e4m3fn)


def column_major(sf: torch.Tensor) -> torch.Tensor:
    """Return a copy of ``sf`` (R, C), 4 bytes an element, stored column by column, each column a multiple of 16 bytes."""
    rows, columns = sf.shape
    pitch = -(-rows // _COLUMN_ALIGNMENT) * _COLUMN_ALIGNMENT
    stored = sf.new_empty(columns * pitch).as_strided((rows, columns), (1, pitch))
    return stored.copy_(sf)


def canonical_nan(values: torch.Tensor) -> torch.Tensor:
    """Return ``values`` (float32 or bfloat16, contiguous) with the bits of every NaN as the GPU's arithmetic gives them."""
    integer, bits = _CANONICAL_NAN[values.dtype]
    return values.view(integer).masked_fill(values.isnan(), bits).view(values.dtype)

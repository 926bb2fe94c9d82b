"""The rules that the quantisation references share: scales, rounding to 8, 6 and 4 bits, layouts of scale factors.

Every quotient is one of two tensors: torch on CUDA turns a division by a Python number into a multiplication by its
reciprocal, which rounds differently.
"""

from __future__ import annotations

import itertools

import torch

E4M3_MAX = 448.0
E2M1_MAX = 6.0
E5M6_MAX = 65024.0
NAN_EXPONENT = 255
"""Exponent field of infinity and NaN: as a ue8m0 byte NaN, as the bits of a float32 infinity."""

_MANTISSA_BITS = 23
_MANTISSA_MASK = (1 << _MANTISSA_BITS) - 1
_E4M3_NAN = 0x7F
_BYTES_PER_WORD = 4
_COLUMN_ALIGNMENT_BYTES = 16
_SMALLEST_UE8M0_BITS = 0x00400000
_E2M1_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_E2M1_SIGN = 8
_CANONICAL_NAN = {torch.float32: (torch.int32, 0x7FFFFFFF), torch.bfloat16: (torch.int16, 0x7FFF)}


def block_amax(values: torch.Tensor, bm: int, bk: int) -> torch.Tensor:
    """Return the largest absolute value of each ``bm`` x ``bk`` block, NaN elements ignored; 0 where there are no others.

    Shapes: values (T, H) float32 -> (ceil(T / bm), ceil(H / bk)); the last blocks may be short.
    """
    rows, columns = values.shape
    magnitudes = torch.where(values.isnan(), 0.0, values.abs())
    padded = torch.nn.functional.pad(magnitudes, (0, -columns % bk, 0, -rows % bm))
    return padded.view(-(-rows // bm), bm, -(-columns // bk), bk).amax(dim=(1, 3))


def scales(
    amax: torch.Tensor, amax_min: float, *, rounded: bool, largest: float = E4M3_MAX
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (exponent fields, sf, inv) of blocks whose largest absolute values are ``amax`` (float32, any shape).

    With a = max(amax, amax_min): sf = a / largest and inv = largest / a, each rounded once; ``largest`` is the greatest
    value of the target format. ``rounded``: sf is the smallest normal power of two that is not below a / largest, inv its
    reciprocal; for an infinite a, sf is infinite and inv 0. The fields (int32) are those of the rounded scale in either case.
    """
    a = amax.clamp(min=amax_min)
    top = torch.full_like(a, largest)
    quotient = a / top
    fields = exponent_fields(quotient)
    if not rounded:
        return fields, quotient, top / a
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


def given_scales(*formats: torch.Tensor | None) -> torch.Tensor:
    """Return the one of a kernel's arguments for scales that is given, whose dtype says the format."""
    (given,) = [sf for sf in formats if sf is not None]
    return given


def scale_values(sf: torch.Tensor) -> torch.Tensor:
    """Return the float32 values of scale factors whose dtype says the format: float32, float8_e4m3fn or int32 of packed ue8m0.

    Shapes: sf (R, C), packed (R, W), any strides -> (R, C), of packed words (R, 4 W).
    """
    return ue8m0_value(unpack_ue8m0(sf)) if sf.dtype == torch.int32 else sf.float()


def expand(scale: torch.Tensor, bm: int, bk: int, shape: tuple[int, ...]) -> torch.Tensor:
    """Return for each element of a (T, H) ``shape`` the scale of its block of ``bm`` rows and ``bk`` columns."""
    rows = torch.arange(shape[0], device=scale.device) // bm
    columns = torch.arange(shape[1], device=scale.device) // bk
    return scale[rows][:, columns]


def round_to_e4m3(values: torch.Tensor) -> torch.Tensor:
    """Return ``values`` (float32) as float8_e4m3fn: nearest even, saturating at +-448; every NaN becomes the code 0x7F."""
    codes = values.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    return codes.view(torch.uint8).masked_fill(values.isnan(), _E4M3_NAN).view(torch.float8_e4m3fn)


def round_to_e2m1(values: torch.Tensor) -> torch.Tensor:
    """Return the e2m1 codes of ``values`` (float32) as uint8 0 to 15: nearest even, saturating at +-6; NaN becomes +6.

    Magnitudes between two neighbours go to the nearer one, those in the middle to the one whose code is even.
    """
    magnitude = values.abs()
    codes = torch.zeros_like(values, dtype=torch.uint8)
    for code, (low, high) in enumerate(itertools.pairwise(_E2M1_MAGNITUDES)):
        middle = (low + high) / 2
        codes += (magnitude >= middle if code % 2 else magnitude > middle).to(torch.uint8)
    codes = torch.where(values.isnan(), len(_E2M1_MAGNITUDES) - 1, codes)
    return codes + _E2M1_SIGN * (values.signbit() & ~values.isnan()).to(torch.uint8)


def e2m1_values(codes: torch.Tensor) -> torch.Tensor:
    """Return the float32 values of e2m1 ``codes`` (integers 0 to 15, any shape); code 8 gives -0.0."""
    table = torch.tensor(_E2M1_MAGNITUDES, device=codes.device)
    signed = torch.cat((table, -table))
    return signed[codes.long()]


def pack_e2m1(codes: torch.Tensor) -> torch.Tensor:
    """Pack ``codes`` (..., H) of 4 bits, H even, into int8 (..., H / 2): the even column in the low half of a byte."""
    return (codes[..., 0::2] | codes[..., 1::2] << 4).view(torch.int8)


def unpack_e2m1(data: torch.Tensor) -> torch.Tensor:
    """Return the codes (uint8 0 to 15) of ``data`` (..., W) int8 as (..., 2 W)."""
    packed = data.contiguous().view(torch.uint8)
    return torch.stack((packed & 0xF, packed >> 4), dim=-1).flatten(-2)


def column_major(sf: torch.Tensor) -> torch.Tensor:
    """Return a copy of ``sf`` (R, C), 1 or 4 bytes an element, stored column by column, each column a multiple of 16 bytes."""
    rows, columns = sf.shape
    alignment = _COLUMN_ALIGNMENT_BYTES // sf.element_size()
    pitch = -(-rows // alignment) * alignment
    stored = sf.new_empty(columns * pitch).as_strided((rows, columns), (1, pitch))
    return stored.copy_(sf)


def canonical_nan(values: torch.Tensor) -> torch.Tensor:
    """Return ``values`` (float32 or bfloat16, contiguous) with the bits of every NaN as the GPU's arithmetic gives them."""
    integer, bits = _CANONICAL_NAN[values.dtype]
    return values.view(integer).masked_fill(values.isnan(), bits).view(values.dtype)

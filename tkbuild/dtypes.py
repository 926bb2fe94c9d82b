"""Element types: torch's spelling, the short name used in variant ids, and the size. Needs no torch."""

from __future__ import annotations

import difflib
from dataclasses import dataclass

from tkbuild.errors import ArgumentError


@dataclass(frozen=True)
class Dtype:
    """One element type.

    ``torch_name`` is the attribute of ``torch`` that a tensor of it has as dtype, or None for a format that torch
    keeps only inside other types (4-bit floats travel as int8 or ``float4_e2m1fn_x2``).
    """

    name: str
    short: str
    bits: int
    kind: str
    torch_name: str | None


def _torch(name: str, short: str, bits: int, kind: str) -> Dtype:
    return Dtype(name, short, bits, kind, name)


DTYPES: dict[str, Dtype] = {
    dtype.name: dtype
    for dtype in (
        _torch("bfloat16", "bf16", 16, "float"),
        _torch("float16", "f16", 16, "float"),
        _torch("float32", "f32", 32, "float"),
        _torch("float64", "f64", 64, "float"),
        _torch("float8_e4m3fn", "e4m3", 8, "float"),
        _torch("float8_e5m2", "e5m2", 8, "float"),
        _torch("float8_e8m0fnu", "e8m0", 8, "float"),
        Dtype("float4_e2m1fn", "e2m1", 4, "float", None),
        _torch("float4_e2m1fn_x2", "e2m1x2", 8, "float"),
        _torch("int8", "i8", 8, "int"),
        _torch("int16", "i16", 16, "int"),
        _torch("int32", "i32", 32, "int"),
        _torch("int64", "i64", 64, "int"),
        _torch("uint8", "u8", 8, "uint"),
        _torch("uint16", "u16", 16, "uint"),
        _torch("uint32", "u32", 32, "uint"),
        _torch("uint64", "u64", 64, "uint"),
        _torch("bool", "bool", 8, "bool"),
    )
}
"""Every element type by name."""

BY_SHORT_NAME: dict[str, Dtype] = {dtype.short: dtype for dtype in DTYPES.values()}
"""Every element type by the short name used in variant ids."""

TENSOR_DTYPES: frozenset[str] = frozenset(dtype.name for dtype in DTYPES.values() if dtype.torch_name)
"""Names a tensor argument may have."""


def dtype(name: str) -> Dtype:
    """Return the element type called ``name`` (torch's spelling, without ``torch.``).

    Raises: ArgumentError, naming the nearest known type; a short name is not accepted here, but is hinted at.
    """
    found = DTYPES.get(name)
    if found is None:
        raise ArgumentError(f"unknown dtype {name!r}{_hint(name)}; known: {', '.join(DTYPES)}", dtype=name)
    return found


def _hint(name: str) -> str:
    by_short = BY_SHORT_NAME.get(name)
    nearest = [by_short.name] if by_short else difflib.get_close_matches(name, DTYPES, n=1)
    return f"; did you mean {nearest[0]}?" if nearest else ""

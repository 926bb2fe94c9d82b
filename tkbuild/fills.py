"""Random values for the tensors of verify and bench cases, by name: ``normal``, ``uniform(-1, 1)``, ``randint(0, 8)``.

Every fill draws in float32 or integers on the tensor's device from the generator it is given, and converts once.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from tkbuild.errors import ArgumentError

_CALL = re.compile(r"(?P<name>[a-z][a-z0-9_]*)(?:\((?P<args>[^()]*)\))?", re.ASCII)
_SPECIAL_VALUES = (float("nan"), float("inf"), float("-inf"), 0.0, -0.0, 448.0, 464.0, -464.0, 1e-42)
_SPECIAL_ROWS = 220
_SPECIAL_SHARE = 1 / 64
#: Exponents drawn by ``random_scale``: the range in which a scaled normal number stays finite in float32.
_MIN_EXPONENT, _MAX_EXPONENT = -110, 126
_F32_MAX = torch.finfo(torch.float32).max


@dataclass(frozen=True)
class Draw:
    """Where and what to draw: ``shape`` in elements, the dtype wanted in the end, and the source of randomness."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    generator: torch.Generator

    @property
    def device(self) -> torch.device:
        return self.generator.device

    def normal(self) -> torch.Tensor:
        return torch.randn(self.shape, generator=self.generator, device=self.device)

    def uniform(self, low: float, high: float) -> torch.Tensor:
        return torch.rand(self.shape, generator=self.generator, device=self.device) * (high - low) + low

    def integers(self, low: int, high: int) -> torch.Tensor:
        """Integers in [low, high)."""
        return torch.randint(low, high, self.shape, generator=self.generator, device=self.device)


def fill(text: str, draw: Draw) -> torch.Tensor:
    """Return a contiguous tensor of ``draw.shape`` and ``draw.dtype``, filled as ``text`` says.

    Raises: ArgumentError for an unknown fill or wrong arguments, naming what there is.
    """
    match = _CALL.fullmatch(text.replace(" ", ""))
    function = _FILLS.get(match["name"]) if match else None
    if match is None or function is None:
        raise ArgumentError(f"unknown fill {text!r}; there are: {', '.join(sorted(_FILLS))}", fill=text)
    try:
        values = function(draw, [float(arg) for arg in (match["args"] or "").split(",") if arg])
    except (IndexError, ValueError) as exc:
        raise ArgumentError(f"fill {text!r}: wrong arguments; uniform(low, high), randint(low, high)", fill=text) from exc
    return values if values.dtype == draw.dtype else values.to(draw.dtype)


def _with_specials(draw: Draw, _args: Sequence[float]) -> torch.Tensor:
    """Normal numbers, some replaced by NaN, infinities, zeros and range ends; the first row all zero, the last all NaN."""
    values = draw.normal()
    special = torch.tensor(_SPECIAL_VALUES, device=draw.device)
    which = torch.randint(len(_SPECIAL_VALUES), draw.shape, generator=draw.generator, device=draw.device)
    chosen = torch.rand(draw.shape, generator=draw.generator, device=draw.device) < _SPECIAL_SHARE
    values = torch.where(chosen, special[which], values)
    if len(draw.shape) > 1 and draw.shape[0] > 2:
        values[0] = 0.0
        values[-1] = float("nan")
    return values


def _random_scale(draw: Draw, _args: Sequence[float]) -> torch.Tensor:
    """Normal numbers times 2**u with integer u, so that groups differ widely in magnitude."""
    exponent = draw.integers(_MIN_EXPONENT, _MAX_EXPONENT + 1).float()
    return (draw.normal() * torch.exp2(exponent)).clamp(-_F32_MAX / 8, _F32_MAX / 8)


def _codes(draw: Draw, _args: Sequence[float]) -> torch.Tensor:
    """Every bit pattern of an 8-bit format, NaN included."""
    return draw.integers(0, 256).to(torch.uint8).view(draw.dtype)


def _scale_words(draw: Draw, _args: Sequence[float]) -> torch.Tensor:
    """32-bit words of four random ue8m0 bytes."""
    return draw.integers(-(2**31), 2**31).to(torch.int32)


def _random_bits(draw: Draw, _args: Sequence[float]) -> torch.Tensor:
    """Every bit pattern of the dtype, NaN payloads and denormals included."""
    size = (math.prod(draw.shape) * draw.dtype.itemsize,)
    drawn = torch.randint(0, 256, size, generator=draw.generator, device=draw.device, dtype=torch.uint8)
    return drawn.view(draw.dtype).view(draw.shape)


def _gate_scores(draw: Draw, _args: Sequence[float]) -> torch.Tensor:
    """Scores whose rows cycle through what serving meets: NaN of all kinds, infinities, ties, zeros of both signs, denormals."""
    scores = draw.normal()
    nan, inf = float("nan"), float("inf")
    mixed = torch.tensor([nan, inf, -inf, 0.0, -0.0, 1.0], device=draw.device)
    rows: list[Callable[[torch.Tensor], torch.Tensor]] = [
        lambda row: torch.full_like(row, nan),
        lambda row: torch.where(torch.arange(row.numel(), device=row.device) == row.numel() // 2, nan, row),
        lambda row: torch.full_like(row, inf),
        lambda row: torch.full_like(row, -inf),
        lambda row: mixed[torch.randint(len(mixed), row.shape, generator=draw.generator, device=row.device)],
        lambda row: torch.full_like(row, 0.25),
        lambda row: mixed[3 + torch.randint(2, row.shape, generator=draw.generator, device=row.device)],
        lambda row: torch.randint(-2, 3, row.shape, generator=draw.generator, device=row.device).float(),
        lambda row: row * 1e-42,
        lambda row: torch.where(torch.arange(row.numel(), device=row.device) % max(1, row.numel() // 3) == 0, row, -inf),
        lambda row: -torch.full_like(row, nan),
    ]
    for index in range(min(draw.shape[0], _SPECIAL_ROWS)):
        scores[index] = rows[index % len(rows)](scores[index])
    return scores


def _constant(value: float) -> Callable[[Draw, Sequence[float]], torch.Tensor]:
    return lambda draw, _args: torch.full(draw.shape, value, device=draw.device)


_FILLS: dict[str, Callable[[Draw, Sequence[float]], torch.Tensor]] = {
    "normal": lambda draw, _args: draw.normal(),
    "uniform": lambda draw, args: draw.uniform(args[0], args[1]),
    "randint": lambda draw, args: draw.integers(int(args[0]), int(args[1])),
    "ties": lambda draw, _args: draw.integers(-2, 3),
    "normal_with_specials": _with_specials,
    "random_scale": _random_scale,
    "codes": _codes,
    "e4m3_codes": _codes,
    "scales_f32": lambda draw, _args: torch.exp2(draw.uniform(-20.0, 4.0)),
    "scales_ue8m0_words": _scale_words,
    "random_bits": _random_bits,
    "moe_scores_with_specials": _gate_scores,
    "zeros": _constant(0.0),
    "ones": _constant(1.0),
}

"""Random values for the tensors of verify and bench cases, by name: ``normal``, ``uniform(-1, 1)``, ``inverse_of(ids)``.

An argument is a number, an expression over the call's values (``randint(-1, T * k)``) or the name of an argument that is
already filled. Every fill draws in float32 or integers on the tensor's device from the generator it is given, and converts
once. ``none`` leaves an optional argument out.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tkbuild.errors import ArgumentError
from tkbuild.expr import Expr

_CALL = re.compile(r"(?P<name>[a-z][a-z0-9_]*)(?:\((?P<args>.*)\))?", re.ASCII)
_NO_TENSOR = "none"
_SPECIAL_VALUES = (float("nan"), float("inf"), float("-inf"), 0.0, -0.0, 448.0, 464.0, -464.0, 1e-42)
_SPECIAL_ROWS = 220
_SPECIAL_SHARE = 1 / 64
_EMPTY_SHARE = 1 / 8
#: Exponents drawn by ``random_scale``: the range in which a scaled normal number stays finite in float32.
_MIN_EXPONENT, _MAX_EXPONENT = -110, 126
_F32_MAX = torch.finfo(torch.float32).max


#: Numbers and tensors; a fill that is given the wrong kind raises what the caller turns into its error.
FillArgument = Any
Args = Sequence[FillArgument]


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


def fill(
    text: str, draw: Draw, values: Mapping[str, Any] | None = None, drawn: Mapping[str, torch.Tensor] | None = None
) -> torch.Tensor | None:
    """Return a contiguous tensor of ``draw.shape`` and ``draw.dtype``, filled as ``text`` says; None for the fill ``none``.

    values: what expressions in ``text`` may name.  drawn: the arguments filled so far, by name.
    Raises: ArgumentError for an unknown fill or wrong arguments, naming what there is.
    """
    if text == _NO_TENSOR:
        return None
    match = _CALL.fullmatch(text.replace(" ", ""))
    function = _FILLS.get(match["name"]) if match else None
    if match is None or function is None:
        raise ArgumentError(f"unknown fill {text!r}; there are: {', '.join(sorted(_FILLS))}", fill=text)
    try:
        args = [_argument(arg, values or {}, drawn or {}) for arg in _split(match["args"] or "")]
        result = function(draw, args)
    except (IndexError, ValueError, TypeError, AttributeError) as exc:
        raise ArgumentError(f"fill {text!r}: wrong arguments ({exc}); uniform(low, high), randint(low, high)", fill=text) from exc
    return result if result.dtype == draw.dtype else result.to(draw.dtype)


def _split(args: str) -> Iterator[str]:
    """Yield the arguments in ``args``; commas inside parentheses belong to one argument."""
    start = depth = 0
    for position, character in enumerate(args + ","):
        depth += (character == "(") - (character == ")")
        if character == "," and depth == 0:
            if position > start:
                yield args[start:position]
            start = position + 1


def _argument(text: str, values: Mapping[str, Any], drawn: Mapping[str, torch.Tensor]) -> FillArgument:
    if text in drawn:
        return drawn[text]
    try:
        return float(text)
    except ValueError:
        return float(Expr.parse(text).evaluate(values))


def _with_specials(draw: Draw, _args: Args) -> torch.Tensor:
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


def _random_scale(draw: Draw, _args: Args) -> torch.Tensor:
    """Normal numbers times 2**u with integer u, so that groups differ widely in magnitude."""
    exponent = draw.integers(_MIN_EXPONENT, _MAX_EXPONENT + 1).float()
    return (draw.normal() * torch.exp2(exponent)).clamp(-_F32_MAX / 8, _F32_MAX / 8)


def _codes(draw: Draw, _args: Args) -> torch.Tensor:
    """Every bit pattern of an 8-bit format, NaN included."""
    return draw.integers(0, 256).to(torch.uint8).view(draw.dtype)


def _scale_words(draw: Draw, _args: Args) -> torch.Tensor:
    """32-bit words of four random ue8m0 bytes."""
    return draw.integers(-(2**31), 2**31).to(torch.int32)


def _random_bits(draw: Draw, _args: Args) -> torch.Tensor:
    """Every bit pattern of the dtype, NaN payloads and denormals included."""
    size = (math.prod(draw.shape) * draw.dtype.itemsize,)
    drawn = torch.randint(0, 256, size, generator=draw.generator, device=draw.device, dtype=torch.uint8)
    return drawn.view(draw.dtype).view(draw.shape)


def _gate_scores(draw: Draw, _args: Args) -> torch.Tensor:
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


def _slots(draw: Draw, args: Args) -> torch.Tensor:
    """Different numbers below ``args[0]`` in random order, -1 in about an eighth of the places and where they run out."""
    count, size = int(args[0]), math.prod(draw.shape)
    order = torch.randperm(max(count, size), generator=draw.generator, device=draw.device)[:size]
    empty = torch.rand((size,), generator=draw.generator, device=draw.device) < _EMPTY_SHARE
    return torch.where((order >= count) | empty, -1, order).view(draw.shape)


def _where_valid(draw: Draw, args: Args) -> torch.Tensor:
    """Integers in [args[1], args[2]) where the tensor ``args[0]`` of the same shape is not negative, -1 elsewhere."""
    return torch.where(args[0] < 0, -1, draw.integers(int(args[1]), int(args[2])))


def _inverse_of(draw: Draw, args: Args) -> torch.Tensor:
    """The place of each number in the tensor ``args[0]`` of different numbers, -1 for numbers that it lacks."""
    places = torch.full(draw.shape, -1, device=draw.device).flatten()
    numbers = args[0].flatten().long()
    valid = numbers >= 0
    places[numbers[valid]] = torch.arange(numbers.numel(), device=draw.device)[valid]
    return places.view(draw.shape)


def _segment_ends(draw: Draw, args: Args) -> torch.Tensor:
    """Ends of segments in ``args[0]`` rows; each starts at the end of the one before, rounded up to ``args[1]``."""
    rows, alignment = int(args[0]), int(args[1])
    ends = draw.integers(0, rows // alignment + 1).sort().values * alignment
    starts = torch.cat((ends.new_zeros(1), ends[:-1]))
    unused = draw.integers(0, alignment)
    return torch.where(ends > starts, ends - unused, ends)


def _constant(value: float) -> Callable[[Draw, Args], torch.Tensor]:
    return lambda draw, _args: torch.full(draw.shape, value, device=draw.device)


_FILLS: dict[str, Callable[[Draw, Args], torch.Tensor]] = {
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
    "slots": _slots,
    "where_valid": _where_valid,
    "inverse_of": _inverse_of,
    "segment_ends": _segment_ends,
    "moe_scores_with_specials": _gate_scores,
    "zeros": _constant(0.0),
    "ones": _constant(1.0),
}

"""Tensors of more or fewer dimensions than an argument has, as the launcher takes them (``Fold`` in call.cc)."""

from __future__ import annotations

import functools
import itertools
import math

from tkbuild.signature import ArgSpec

__all__ = ["fold", "folded_layout"]

_MAX_LAYOUTS = 4096

Layout = tuple[tuple[int, ...], tuple[int, ...]]


def fold(arg: ArgSpec, shape: tuple[int, ...], strides: tuple[int, ...]) -> Layout | None:
    """Return the shape and strides that ``arg`` sees of a tensor, or None where its dimensions or strides do not allow that.

    The first dimensions count as one, of size 1 if there are none; where the argument ends in a constant size, as many of the last
    dimensions count as one as make it up.
    """
    if len(shape) == len(arg.shape):
        return shape, strides
    if not arg.folds:
        return None
    wanted = tuple([None if expr.names() else int(expr.evaluate({})) for expr in arg.shape])
    known = all(type(extent) is int for extent in (*shape, *strides))  # not so while torch traces with sizes that it keeps open
    return (folded_layout if known else folded_layout.__wrapped__)(wanted, tuple(shape), tuple(strides))


@functools.lru_cache(_MAX_LAYOUTS)
def folded_layout(wanted: tuple[int | None, ...], shape: tuple[int, ...], strides: tuple[int, ...]) -> Layout | None:
    """``fold`` to as many dimensions as ``wanted`` has, which are constants or None."""
    dims = list(zip(shape, strides, strict=True))
    empty = 0 in shape
    result: list[tuple[int, int]] = []
    for axis in range(len(wanted) - 1, -1, -1):
        if axis > 0 and not dims:
            return None
        taken: list[tuple[int, int]] = []
        joined = (wanted[axis] or 0) if axis == len(wanted) - 1 else 0
        while dims and (axis == 0 or not taken or math.prod(extent for extent, _ in taken) < joined):
            taken.append(dims.pop())
        moving = [(extent, stride) for extent, stride in taken if extent > 1]
        if not empty and any(outer != extent * stride for (extent, stride), (_, outer) in itertools.pairwise(moving)):
            return None
        dense = math.prod(max(extent, 1) for extent, _ in result)
        result.append((math.prod(extent for extent, _ in taken), moving[0][1] if moving else dense))
    if dims:
        return None
    sizes, steps = zip(*reversed(result), strict=True)
    return sizes, steps

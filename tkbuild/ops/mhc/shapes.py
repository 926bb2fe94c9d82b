"""Leading dimensions of tokens taken as one. Torch's own views cost more than the rest of a small call; they are made where one is traced
or differentiated."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from tkbuild.errors import ArgumentError
from tkbuild.runtime.fold import folded_layout
from tkbuild.runtime.op import contiguous_strides, is_traced, new_empty, view_of

__all__ = ["STREAMS", "like", "matrices", "outputs", "rows", "streams", "taken", "tokens"]

#: The residual streams that the kernels are built for.
STREAMS = 4

#: Tensors of fewer dimensions are viewed: none of the kernels has an argument of more.
_FOLDED_DIMS = 3


def tokens(kernel: str, name: str, tensor: torch.Tensor, *endings: tuple[int, ...]) -> torch.Tensor:
    """Return ``tensor`` as (n, columns), its shape ending in one of ``endings`` of as many columns.

    Raises: ArgumentError for another shape, and for strides that cannot be viewed so.
    """
    shape = tensor.shape
    for ending in endings:
        if shape[-len(ending) :] == ending:
            if len(shape) == 2 and len(ending) == 1:
                return tensor
            return _folded(kernel, name, tensor, len(ending), True)
    expected = " or ".join(f"(..., {', '.join(map(str, ending))})" for ending in endings)
    raise ArgumentError(f"{kernel}: {name} has shape {tuple(shape)}, expected {expected}", kernel=kernel, argument=name)


def matrices(kernel: str, name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Return ``tensor`` (..., m, m) as (n, m, m). Raises: ArgumentError."""
    shape = tensor.shape
    if shape[-2:] != (STREAMS, STREAMS):
        raise ArgumentError(
            f"{kernel}: {name} has shape {tuple(shape)}, expected (..., {STREAMS}, {STREAMS})", kernel=kernel, argument=name
        )
    return tensor if len(shape) == 3 else _folded(kernel, name, tensor, 2, False)


def like(tensor: torch.Tensor, model: torch.Tensor) -> torch.Tensor:
    """Return ``tensor``, contiguous and of as many elements, in the shape of ``model``."""
    shape = model.shape
    if tensor.shape == shape:
        return tensor
    if tensor.requires_grad or is_traced(tensor):
        return tensor.view(shape)
    size = tuple(shape)
    return view_of(tensor, size, contiguous_strides(size), 0)


def rows(kernel: str, name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Return ``tensor`` (..., H) as (n, H). Raises: ArgumentError."""
    if tensor.dim() == 2:
        return tensor
    if tensor.dim() < 1:
        raise ArgumentError(f"{kernel}: {name} has no dimensions, expected (..., H)", kernel=kernel, argument=name)
    return _folded(kernel, name, tensor, 1, False)


def streams(kernel: str, name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Return ``tensor`` (..., m, H) as (n, m, H). Raises: ArgumentError."""
    if tensor.dim() == 3:
        return tensor
    if tensor.dim() < 2:
        raise ArgumentError(f"{kernel}: {name} has {tensor.dim()} dimensions, expected (..., m, H)", kernel=kernel, argument=name)
    return _folded(kernel, name, tensor, 2, False)


def taken(
    view: Callable[..., torch.Tensor], kernel: str, name: str, tensor: torch.Tensor, *endings: tuple[int, ...]
) -> torch.Tensor:
    """Return ``view(kernel, name, tensor, *endings)``, or the tensor itself where the launcher can count its first dimensions as one."""
    shape = tensor.shape
    known = not endings or any(shape[-len(ending) :] == ending for ending in endings)
    return tensor if known and len(shape) >= _FOLDED_DIMS and not is_traced(tensor) else view(kernel, name, tensor, *endings)


def outputs(*models: torch.Tensor) -> tuple[torch.Tensor, ...] | None:
    """Return contiguous tensors of the shapes and dtypes of ``models``; None where the op makes its own: where torch traces, and for
    one token's (m, 1), which the launcher would take for m tokens."""
    if any(is_traced(model) or (model.dim() == 2 and model.shape[1] == 1) for model in models):
        return None
    return tuple([new_empty(model, model.shape, model.dtype) for model in models])


def _folded(kernel: str, name: str, tensor: torch.Tensor, kept: int, joined: bool) -> torch.Tensor:
    """``tensor`` with its dimensions before the last ``kept`` as one, and those last ones, too, if ``joined``."""
    shape = tensor.shape
    tail = shape[len(shape) - kept :]
    if is_traced(tensor):
        return tensor.view(math.prod(shape[: len(shape) - kept]), *((math.prod(tail),) if joined else tail))
    layout = folded_layout((None, math.prod(tail)) if joined else (None,) * (kept + 1), shape, tensor.stride())
    if layout is None:
        raise ArgumentError(
            f"{kernel}: {name} has shape {tuple(shape)} and strides {tensor.stride()}, expected leading dimensions that can "
            "be viewed as one",
            kernel=kernel,
            argument=name,
        )
    return tensor.view(layout[0]) if tensor.requires_grad else view_of(tensor, *layout, 0)

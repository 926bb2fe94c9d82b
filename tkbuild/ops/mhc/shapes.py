"""Leading dimensions of tokens, viewed as one."""

from __future__ import annotations

import math

import torch

from tkbuild.errors import ArgumentError

__all__ = ["STREAMS", "like", "matrices", "rows", "streams", "tokens"]

#: The residual streams that the kernels are built for.
STREAMS = 4


def tokens(kernel: str, name: str, tensor: torch.Tensor, *endings: tuple[int, ...]) -> torch.Tensor:
    """Return ``tensor`` as (n, columns), its shape ending in one of ``endings`` of as many columns.

    Raises: ArgumentError for another shape, and for strides that cannot be viewed so.
    """
    shape = tuple(tensor.shape)
    for ending in endings:
        lead = len(shape) - len(ending)
        if lead >= 0 and shape[lead:] == ending:
            if lead == 1 and len(ending) == 1:
                return tensor
            return _viewed(kernel, name, tensor, math.prod(shape[:lead]), math.prod(ending))
    expected = " or ".join(f"(..., {', '.join(map(str, ending))})" for ending in endings)
    raise ArgumentError(f"{kernel}: {name} has shape {tuple(tensor.shape)}, expected {expected}", kernel=kernel, argument=name)


def matrices(kernel: str, name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Return ``tensor`` (..., m, m) as (n, m, m). Raises: ArgumentError."""
    if tensor.dim() == 3 and tensor.shape[1] == tensor.shape[2] == STREAMS:
        return tensor
    return tokens(kernel, name, tensor, (STREAMS, STREAMS)).view(-1, STREAMS, STREAMS)


def like(tensor: torch.Tensor, model: torch.Tensor) -> torch.Tensor:
    """Return ``tensor`` in the shape of ``model``, itself where it has that: a view costs more than the rest of a small call."""
    return tensor if tensor.shape == model.shape else tensor.view(model.shape)


def rows(kernel: str, name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Return ``tensor`` (..., H) as (n, H). Raises: ArgumentError."""
    if tensor.dim() == 2:
        return tensor
    if tensor.dim() < 1:
        raise ArgumentError(f"{kernel}: {name} has no dimensions, expected (..., H)", kernel=kernel, argument=name)
    return _viewed(kernel, name, tensor, math.prod(tensor.shape[:-1]), tensor.shape[-1])


def streams(kernel: str, name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Return ``tensor`` (..., m, H) as (n, m, H). Raises: ArgumentError."""
    if tensor.dim() == 3:
        return tensor
    if tensor.dim() < 2:
        raise ArgumentError(f"{kernel}: {name} has {tensor.dim()} dimensions, expected (..., m, H)", kernel=kernel, argument=name)
    return _viewed(kernel, name, tensor, math.prod(tensor.shape[:-2]), *tensor.shape[-2:])


def _viewed(kernel: str, name: str, tensor: torch.Tensor, *shape: int) -> torch.Tensor:
    try:
        return tensor.view(shape)
    except RuntimeError as exc:
        raise ArgumentError(
            f"{kernel}: {name} has shape {tuple(tensor.shape)} and strides {tensor.stride()}, expected leading dimensions that can "
            "be viewed as one",
            kernel=kernel,
            argument=name,
        ) from exc

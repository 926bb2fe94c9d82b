"""One gradient of a residual that several layers add to in place, instead of one for each that autograd adds up.

``mhc_post``, which the backward pass reaches first, leaves the gradient that it returns as ``grad_from_mhc_post`` on the
residual's storage. A layer that finds it there adds its own part and returns None. That is right only as long as autograd
still holds that very gradient: once it has added another one to it, or handed it on, the layer returns a gradient of its own.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.compiler import is_compiling

__all__ = ["publish_grad", "published_grad", "withdraw_grad"]

_GRAD, _ORIGIN = "grad_from_mhc_post", "origin_of_grad_from_mhc_post"
#: References to a storage that nobody but the attribute holds: of the tensor there, and of the object that is asked.
_UNSHARED_COUNT = 2


def publish_grad(residual: torch.Tensor, grad: torch.Tensor) -> None:
    """Leave ``grad``, which a backward function is about to return for ``residual``, on the residual's storage."""
    if is_compiling():
        return
    storage: Any = residual.untyped_storage()
    setattr(storage, _GRAD, grad.detach())
    setattr(storage, _ORIGIN, _origin(residual))


def published_grad(residual: torch.Tensor) -> torch.Tensor | None:
    """Return the gradient that ``mhc_post`` returned for ``residual`` in this backward pass, if adding to it still has an effect."""
    if is_compiling():
        return None
    storage = residual.untyped_storage()
    grad: torch.Tensor | None = getattr(storage, _GRAD, None)
    if grad is None or getattr(storage, _ORIGIN, None) != _origin(residual) or not _is_held(grad):
        return None
    return grad


def withdraw_grad(residual: torch.Tensor) -> None:
    """Remove what ``publish_grad`` left, so that the storage does not keep the gradient alive."""
    if is_compiling():
        return
    storage = residual.untyped_storage()
    for name in (_GRAD, _ORIGIN):
        if hasattr(storage, name):
            delattr(storage, name)


def _origin(residual: torch.Tensor) -> tuple[int, int, int]:
    """What tells gradients on one storage apart: the backward pass, the place and the size of their tensor."""
    return torch._C._current_graph_task_id(), residual.data_ptr(), residual.numel()


def _is_held(grad: torch.Tensor) -> bool:
    count = getattr(torch._C, "_storage_Use_Count", None)  # not a public name; without it, autograd is trusted to hold it
    return count is None or bool(count(grad.untyped_storage()._cdata) > _UNSHARED_COUNT)

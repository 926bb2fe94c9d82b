"""One gradient of a residual that several layers add to in place, instead of one for each that autograd adds up.

``mhc_post``, which the backward pass reaches first, leaves the gradient that it returns as ``grad_from_mhc_post`` on the
residual's storage. A layer that finds it there adds its own part and returns None. That is right only as long as autograd
still holds that very gradient: once it has added another one to it, or handed it on, the layer returns a gradient of its own. It is
right only for the same input of the graph, too: what lies between, or is another leaf on the same memory, has a gradient of its own.
A backward hook that keeps the gradient of a residual with further users cannot be told from autograd's holding it; keep a copy there.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.compiler import is_compiling

__all__ = ["Edge", "gradient_edge", "publish_grad", "published_grad", "withdraw_grad"]

#: Where autograd collects the gradient of a tensor, or None where it collects none.
Edge = Any

_GRAD, _ORIGIN = "grad_from_mhc_post", "origin_of_grad_from_mhc_post"
#: References to a storage that nobody but the attribute holds: of the tensor there, and of the object that is asked.
_UNSHARED_COUNT = 2


def gradient_edge(residual: torch.Tensor) -> Edge:
    """Return where autograd collects the gradient of ``residual``, for the functions below."""
    if is_compiling() or not residual.requires_grad or not torch.is_grad_enabled():
        return None
    return torch.autograd.graph.get_gradient_edge(residual)


def publish_grad(residual: torch.Tensor, grad: torch.Tensor, edge: Edge) -> None:
    """Leave ``grad``, which a backward function is about to return for ``residual``, on the residual's storage."""
    if is_compiling():
        return
    storage: Any = residual.untyped_storage()
    setattr(storage, _GRAD, grad.detach())
    setattr(storage, _ORIGIN, _origin(residual, edge))


def published_grad(residual: torch.Tensor, edge: Edge) -> torch.Tensor | None:
    """Return the gradient that ``mhc_post`` returned for ``residual`` in this backward pass, if adding to it still has an effect."""
    if is_compiling():
        return None
    storage = residual.untyped_storage()
    grad: torch.Tensor | None = getattr(storage, _GRAD, None)
    if grad is None or getattr(storage, _ORIGIN, None) != _origin(residual, edge) or not _is_held(grad):
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


def _origin(residual: torch.Tensor, edge: Edge) -> tuple[int, ...]:
    """What tells gradients on one storage apart: the backward pass, the place in the graph, and in memory.

    The graph's nodes are alive for as long as they are compared, so that their identities are.
    """
    node = (0, 0) if edge is None else (id(edge.node), edge.output_nr)
    return torch._C._current_graph_task_id(), *node, residual.data_ptr(), residual.numel()


def _is_held(grad: torch.Tensor) -> bool:
    count = getattr(torch._C, "_storage_Use_Count", None)  # not a public name; without it, autograd is trusted to hold it
    return count is None or bool(count(grad.untyped_storage()._cdata) > _UNSHARED_COUNT)

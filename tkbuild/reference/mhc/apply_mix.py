"""References of a layer's input: the residual streams added up with their mixes."""

from __future__ import annotations

from collections.abc import Callable

import torch

from tkbuild.reference.arithmetic import fma
from tkbuild.reference.mhc.recompute import mixed

_CHUNK_TOKENS = 1 << 11


def pre_apply_mix(x: torch.Tensor, mix: torch.Tensor) -> torch.Tensor:
    """Return the sum of mix[i] * x[i] over the streams, added in increasing order by fused multiply-adds, in x's dtype.

    Shapes: x (n, m, H), mix (n, m) -> (n, H).  Dtypes: x and result bfloat16, mix float32; or all float64.
    """
    return _by_chunks(lambda rows: mixed(mix[rows], x[rows]), x.shape[0])


def pre_apply_mix_bwd(
    o_grad: torch.Tensor, x: torch.Tensor, mix: torch.Tensor, x_grad: torch.Tensor | None, *, accumulate: int = 1
) -> tuple[torch.Tensor, ...]:
    """Return x_grad where that is given, and mix_grad: the gradients of ``pre_apply_mix``.

    x_grad[i] = mix[i] * o_grad, with ``accumulate`` as a fused multiply-add onto what was there, in x's dtype; mix_grad[i] is the sum
    of o_grad * x[i] over the columns, here in float64.
    Shapes: o_grad (n, H), x, x_grad (n, m, H), mix (n, m) -> (n, m, H), (n, m).
    """
    mix_grad = _by_chunks(
        lambda rows: torch.einsum("nh,nih->ni", o_grad[rows].double(), x[rows].double()).to(mix.dtype), x.shape[0]
    )
    if x_grad is None:
        return (mix_grad,)
    old = x_grad
    return _by_chunks(lambda rows: _scaled(o_grad[rows], mix[rows], old[rows] if accumulate else None), x.shape[0]), mix_grad


def _scaled(o_grad: torch.Tensor, mix: torch.Tensor, old: torch.Tensor | None) -> torch.Tensor:
    grad, factor = o_grad[:, None], mix[:, :, None]
    if mix.dtype == torch.float64:
        return factor * grad if old is None else factor * grad + old
    total = factor * grad.float() if old is None else fma(factor, grad.float(), old.float())
    return total.to(o_grad.dtype)


def _by_chunks(result_of: Callable[[slice], torch.Tensor], count: int) -> torch.Tensor:
    """The results of ``result_of`` for slices of ``count`` tokens, one behind the other; float64 takes much memory."""
    return torch.cat([result_of(slice(first, first + _CHUNK_TOKENS)) for first in range(0, max(count, 1), _CHUNK_TOKENS)])

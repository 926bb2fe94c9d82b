"""The residual streams behind a layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tkbuild.errors import ArgumentError
from tkbuild.ops.mhc.shapes import STREAMS, like, matrices, outputs, rows, streams, taken, tokens
from tkbuild.runtime.op import kernel_op

__all__ = ["mhc_post_bwd", "mhc_post_fwd"]

_post = kernel_op("mhc.post")
_post_bwd = kernel_op("mhc.post_bwd")

_MIX = ((STREAMS, 1), (STREAMS,))


def mhc_post_fwd(
    x: torch.Tensor,
    residual: torch.Tensor,
    post_layer_mix: torch.Tensor,
    comb_res_mix: torch.Tensor,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the new residual: post_layer_mix[o] * x + the sum of comb_res_mix[i, o] * residual[i], in ``out`` if that is given.

    In float32, stream after stream by fused multiply-adds, rounded to bfloat16 at the end.
    Shapes: x (..., H), residual and out (..., m, H), post_layer_mix (..., m, 1) or (..., m), comb_res_mix (..., m, m), m = 4, H a
    multiple of 8; no tokens are allowed.  Dtypes: x, residual, out bfloat16, mixes float32.
    Layout: contiguous, but residual, which is made so, and the rows of x, which may lie multiples of 8 elements apart.
    Raises: ArgumentError, NoVariantError, LaunchError.
    """
    kernel = "mhc.post"
    outs = outputs(residual) if out is None else (taken(streams, kernel, "out", out),)
    result: torch.Tensor = _post(_inputs(kernel, taken, x, residual, post_layer_mix, comb_res_mix), (), (), outs)
    return like(result, residual) if out is None else out


def mhc_post_bwd(
    x: torch.Tensor, residual: torch.Tensor, post_layer_mix: torch.Tensor, comb_res_mix: torch.Tensor, d_o: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of ``mhc_post_fwd`` with respect to x, residual, post_layer_mix and comb_res_mix, from that of its result.

    Those of the mixes are sums over the columns, in an order that H alone decides.
    Shapes: d_o as residual, the others as there; a gradient has the shape and dtype of its tensor.
    Layout: as there; d_o contiguous.  Raises: ArgumentError, NoVariantError, LaunchError.
    """
    kernel = "mhc.post_bwd"
    given = (*_inputs(kernel, taken, x, residual, post_layer_mix, comb_res_mix), taken(streams, kernel, "d_o", d_o))
    outs = outputs(x, residual, post_layer_mix, comb_res_mix)
    d_x, d_residual, d_post, d_comb = _post_bwd(given, (), (), outs)
    return like(d_x, x), like(d_residual, residual), like(d_post, post_layer_mix), like(d_comb, comb_res_mix)


def folded_inputs(
    kernel: str, x: torch.Tensor, residual: torch.Tensor, post_layer_mix: torch.Tensor, comb_res_mix: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """Return views of the tensors with their leading dimensions as one; ``residual`` is made contiguous. Raises: ArgumentError."""
    return _inputs(kernel, _viewed, x, residual, post_layer_mix, comb_res_mix)


def _viewed(view: Callable[..., torch.Tensor], *args: Any) -> torch.Tensor:
    return view(*args)


def _inputs(
    kernel: str,
    take: Callable[..., torch.Tensor],
    x: torch.Tensor,
    residual: torch.Tensor,
    post_layer_mix: torch.Tensor,
    comb_res_mix: torch.Tensor,
) -> tuple[torch.Tensor, ...]:
    if x.shape[:-1] != residual.shape[:-2]:
        raise ArgumentError(
            f"{kernel}: x has shape {tuple(x.shape)} and residual {tuple(residual.shape)}, expected (..., H) and (..., {STREAMS}, H)",
            kernel=kernel,
        )
    return (
        take(rows, kernel, "x", x),
        take(streams, kernel, "residual", residual.contiguous()),
        take(tokens, kernel, "post_layer_mix", post_layer_mix, *_MIX),
        take(matrices, kernel, "comb_res_mix", comb_res_mix),
    )

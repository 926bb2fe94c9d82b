"""The mixes before a layer, differentiable."""

from __future__ import annotations

import math
from typing import Any

import torch

from tkbuild.errors import ArgumentError
from tkbuild.ops.mhc.norm_fn import fn_partials
from tkbuild.ops.mhc.shapes import streams
from tkbuild.ops.modeling.mhc.gradient_sharing import Edge, gradient_edge, published_grad, withdraw_grad
from tkbuild.runtime.op import kernel_op

__all__ = ["check_fn", "flat_streams", "mhc_pre_norm_fn", "with_norm_weight"]

_KERNEL = "mhc.pre_norm_fn"
_mul = kernel_op("mhc.pre_norm_fn_mul")
_mul_bwd = kernel_op("mhc.pre_norm_fn_mul_bwd")
_normalise = kernel_op("mhc.reduce_partials_and_rmsnorm")
_normalise_bwd = kernel_op("mhc.reduce_partials_and_rmsnorm_bwd")
_merge = kernel_op("mhc.fn_normw_merge")
_merge_bwd = kernel_op("mhc.fn_normw_merge_bwd")


class MergeNormWeight(torch.autograd.Function):
    """fn times the norm's weight, column by column."""

    @staticmethod
    def forward(ctx: Any, fn: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(fn, weight)
        result: torch.Tensor = _merge((fn, weight))
        return result

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        fn, weight = ctx.saved_tensors
        fn_grad = torch.zeros_like(fn) if ctx.needs_input_grad[0] else None
        weight_grad = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        _merge_bwd((fn, weight, grad.contiguous(), fn_grad, weight_grad))
        return fn_grad, weight_grad


class _PreNormFn(torch.autograd.Function):
    """Saves the inputs, their products and sums of squares; may add to the residual's gradient that ``mhc_post`` left."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, fn: torch.Tensor, eps: float, fuse_grad_acc: bool, n_splits: int, edge: Edge
    ) -> torch.Tensor:
        ctx.norm, ctx.edge = (x.shape[1], eps), edge
        out_mul, sqrsum, out = _normalise(_mul((x, fn), (), (1, n_splits)), (), ctx.norm)
        ctx.save_for_backward(x, fn, out_mul, sqrsum)
        ctx.fuse_grad_acc = fuse_grad_acc
        result: torch.Tensor = out
        return result

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, fn, out_mul, sqrsum = ctx.saved_tensors
        needs_x, needs_fn = ctx.needs_input_grad[:2]
        grads = _normalise_bwd((grad.contiguous(), out_mul, sqrsum), (), ctx.norm)
        shared = published_grad(x, ctx.edge) if needs_x and ctx.fuse_grad_acc else None
        fresh = torch.empty_like(x) if needs_x and shared is None else None
        x_grad = fresh if shared is None else shared.view(x.shape)
        fn_grad = torch.empty_like(fn) if needs_fn else None
        partial = fn_partials(x, fn, needs_fn)
        _mul_bwd((*grads, x, fn, x_grad, fn_grad, partial), (), (partial.shape[0], int(shared is not None)))
        if shared is not None:
            withdraw_grad(x)
        return fresh, fn_grad, None, None, None, None


def mhc_pre_norm_fn(
    residual: torch.Tensor,
    mhc_fn: torch.Tensor,
    mhc_norm_weight: torch.Tensor | None,
    mhc_norm_eps: float,
    fuse_grad_acc: bool = True,
    n_splits: int = 16,
) -> torch.Tensor:
    """Return the mixes before a layer: products of the residual, normalised over all its streams, with the rows of ``mhc_fn``.

    The residual is divided by the root of its mean square plus ``mhc_norm_eps``, and multiplied with mhc_norm_weight if that is given. In
    products mhc_fn times mhc_norm_weight is taken as the sum of two bfloat16, 17 or more significant bits; sums are float32 over ``n_splits`` parts of the
    columns.
    Differentiable once with respect to ``residual``, ``mhc_fn`` and ``mhc_norm_weight``. With ``fuse_grad_acc``, where the backward pass has
    reached an ``mhc_post`` of the same residual, the gradient of the residual is added to that one in place, as if both had been
    returned, and the gradient left there is removed.
    Shapes: residual (..., m, H), mhc_fn (24, m * H), mhc_norm_weight (m * H) -> (..., 24); m = 4, H a multiple of 64, n_splits up to 255.
    Dtypes: residual bfloat16, the others float32.  Layout: any; what is not contiguous is copied.
    Raises: ArgumentError, NoVariantError, LaunchError.
    """
    x = flat_streams(_KERNEL, residual)
    merged = with_norm_weight(check_fn(_KERNEL, mhc_fn), mhc_norm_weight)
    settings = (mhc_norm_eps, fuse_grad_acc, n_splits, gradient_edge(residual))
    result: torch.Tensor = _PreNormFn.apply(x, merged, *settings)  # type: ignore[no-untyped-call]
    return result.view(*residual.shape[:-2], mhc_fn.shape[0])


def flat_streams(kernel: str, residual: torch.Tensor) -> torch.Tensor:
    """Return the residual (..., m, H) as (n, m * H). Raises: ArgumentError."""
    given = streams(kernel, "residual", residual.contiguous())
    return given.view(given.shape[0], math.prod(given.shape[1:]))


def check_fn(kernel: str, fn: torch.Tensor) -> torch.Tensor:
    """Return ``fn``, contiguous. Raises: ArgumentError unless it is a matrix."""
    if fn.dim() != 2:
        raise ArgumentError(f"{kernel}: fn has {fn.dim()} dimensions, expected 2: (24, m * H)", kernel=kernel, argument="fn")
    return fn.contiguous()


def with_norm_weight(fn: torch.Tensor, norm_weight: torch.Tensor | None) -> torch.Tensor:
    """Return the rows of ``fn`` times the norm's weight, if there is one; differentiable."""
    if norm_weight is None:
        return fn
    result: torch.Tensor = MergeNormWeight.apply(fn, norm_weight.contiguous())  # type: ignore[no-untyped-call]
    return result

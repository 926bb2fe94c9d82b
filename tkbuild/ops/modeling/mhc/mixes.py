"""Mixes of the head and of a layer, differentiable."""

from __future__ import annotations

from typing import Any

import torch

from tkbuild.errors import ArgumentError
from tkbuild.ops.mhc.mixes import partial_sums
from tkbuild.ops.mhc.shapes import STREAMS
from tkbuild.runtime import get_num_sms
from tkbuild.runtime.op import kernel_op

__all__ = ["mhc_head_compute_mix", "mhc_pre_split_mixes"]

_head = kernel_op("mhc.head_compute_mix")
_head_bwd = kernel_op("mhc.head_compute_mix_bwd")
_split = kernel_op("mhc.pre_split_mixes")
_split_bwd = kernel_op("mhc.pre_split_mixes_bwd")

_ALL = STREAMS * (STREAMS + 2)
Grads = tuple["torch.Tensor | None", ...]


class HeadComputeMix(torch.autograd.Function):
    """Saves the inputs only: the sigmoids are computed again."""

    @staticmethod
    def forward(ctx: Any, mix: torch.Tensor, scale: torch.Tensor, base: torch.Tensor, eps: float) -> torch.Tensor:
        ctx.save_for_backward(mix, scale, base)
        result: torch.Tensor = _head((mix, scale, base), (), (eps,))
        return result

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Grads:
        mix, scale, base = ctx.saved_tensors
        count = get_num_sms(mix.get_device()) if mix.is_cuda else 1
        make = torch.empty if mix.shape[0] else torch.zeros  # without tokens nothing is launched
        partial = make((count, 1 + STREAMS), dtype=torch.float32, device=mix.device)
        mix_grad = _head_bwd((grad.contiguous(), mix, scale, base, partial[:, :1], partial[:, 1:]))
        if not any(ctx.needs_input_grad[1:3]):
            return mix_grad, None, None, None
        sums = partial.sum(0)
        return *_needed(ctx, mix_grad, sums[:1], sums[1:]), None


class PreSplitMixes(torch.autograd.Function):
    """Saves the inputs and post, from which its gradient is computed."""

    @staticmethod
    def forward(
        ctx: Any, mixes: torch.Tensor, scale: torch.Tensor, base: torch.Tensor, post_mult: float, eps: float
    ) -> tuple[torch.Tensor, ...]:
        pre, post, comb = _split((mixes, scale, base), (), (post_mult, eps))
        ctx.save_for_backward(mixes, scale, base, post)
        ctx.mhc_post_mult_value = post_mult
        return pre, post, comb

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> Grads:
        mixes, scale, base, post = ctx.saved_tensors
        partial = partial_sums(mixes)
        tensors = (*(grad.contiguous() for grad in grads), mixes, post, scale, base, partial)
        mixes_grad, scale_grad, base_grad = _split_bwd(tensors, (), (partial.shape[0], ctx.mhc_post_mult_value))
        if mixes.shape[0] == 0:  # nothing was launched
            for total in (scale_grad, base_grad):
                total.zero_()
        return *_needed(ctx, mixes_grad, scale_grad, base_grad), None, None


def _needed(ctx: Any, *grads: torch.Tensor) -> Grads:
    return tuple(grad if needed else None for grad, needed in zip(grads, ctx.needs_input_grad, strict=False))


def mhc_head_compute_mix(
    input_mix: torch.Tensor, mhc_scale: torch.Tensor, mhc_base: torch.Tensor, mhc_pre_eps: float
) -> torch.Tensor:
    """Return sigmoid(input_mix * mhc_scale + mhc_base) + mhc_pre_eps.

    Differentiable once with respect to all tensors. The order of the sums in the gradients of scale and base depends on the number
    of tokens and that of the SMs in use.
    Shapes: input_mix (..., m), mhc_scale (1), mhc_base (m), m = 4 -> (..., m).  Dtypes: float32.
    Raises: ArgumentError, NoVariantError, LaunchError.
    """
    _check_columns("mhc.head_compute_mix", "input_mix", input_mix, STREAMS)
    mix = input_mix.reshape(-1, STREAMS).contiguous()
    result: torch.Tensor = HeadComputeMix.apply(mix, mhc_scale, mhc_base, mhc_pre_eps)  # type: ignore[no-untyped-call]
    return result.view(input_mix.shape)


def mhc_pre_split_mixes(
    input_mixes: torch.Tensor,
    mhc_scale: torch.Tensor,
    mhc_base: torch.Tensor,
    mhc_mult: int,
    mhc_post_mult_value: float,
    mhc_pre_eps: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (pre, post, comb), the mixes of a layer's input, of its output and of the residual streams.

    With a = input_mixes * mhc_scale[part] + mhc_base: sigmoid(a) + mhc_pre_eps, sigmoid(a) * mhc_post_mult_value, and a itself.
    Differentiable once with respect to all tensors. The order of the sums in the gradients of scale and base depends on the number
    of tokens and that of the SMs in use.
    Shapes: input_mixes (..., m * (m + 2)), mhc_scale (3), mhc_base (m * (m + 2)) -> (..., m, 1), (..., m, 1), (..., m, m), m = mhc_mult = 4.
    Dtypes: float32.
    Raises: ArgumentError, NoVariantError, LaunchError.
    """
    kernel = "mhc.pre_split_mixes"
    if mhc_mult != STREAMS:
        raise ArgumentError(f"{kernel}: mhc_mult is {mhc_mult}, expected {STREAMS}", kernel=kernel)
    _check_columns(kernel, "input_mixes", input_mixes, _ALL)
    mixes, lead = input_mixes.reshape(-1, _ALL).contiguous(), input_mixes.shape[:-1]
    pre, post, comb = PreSplitMixes.apply(mixes, mhc_scale, mhc_base, mhc_post_mult_value, mhc_pre_eps)  # type: ignore[no-untyped-call]
    return pre.view(*lead, STREAMS, 1), post.view(*lead, STREAMS, 1), comb.view(*lead, STREAMS, STREAMS)


def _check_columns(kernel: str, name: str, tensor: torch.Tensor, columns: int) -> None:
    if tensor.dim() < 1 or tensor.shape[-1] != columns:
        raise ArgumentError(
            f"{kernel}: {name} has shape {tuple(tensor.shape)}, expected (..., {columns})", kernel=kernel, argument=name
        )

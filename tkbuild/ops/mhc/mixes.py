"""Mixes of the head and of a layer, from products of the residual."""

from __future__ import annotations

import torch

from tkbuild.errors import ArgumentError
from tkbuild.ops.mhc.shapes import STREAMS, taken, tokens
from tkbuild.runtime import get_num_sms
from tkbuild.runtime.op import kernel_op

__all__ = [
    "mhc_head_compute_mix_bwd",
    "mhc_head_compute_mix_fwd",
    "mhc_pre_split_mixes_bwd",
    "mhc_pre_split_mixes_fwd",
    "partial_sums",
]

_head = kernel_op("mhc.head_compute_mix")
_head_bwd = kernel_op("mhc.head_compute_mix_bwd")
_split = kernel_op("mhc.pre_split_mixes")
_split_bwd = kernel_op("mhc.pre_split_mixes_bwd")

_MIX = ((STREAMS, 1), (STREAMS,))
_COMB = ((STREAMS, STREAMS), (STREAMS * STREAMS,))
_ALL = ((STREAMS * (STREAMS + 2),),)
_CTAS_PER_SM = 4
_SUMS = 27


def mhc_head_compute_mix_fwd(
    input_mix: torch.Tensor,
    mhc_scale: torch.Tensor,
    mhc_base: torch.Tensor,
    output_mix: torch.Tensor,
    mhc_pre_eps: float,
    token_block_size: int = 0,
) -> None:
    """Write sigmoid(input_mix * mhc_scale + mhc_base) + mhc_pre_eps into ``output_mix``; token_block_size decides nothing here.

    Shapes: input_mix, output_mix (..., m), mhc_scale (1), mhc_base (m), m = 4; no tokens are allowed.
    Dtypes: float32.  Layout: contiguous.
    Raises: ArgumentError, NoVariantError, LaunchError.
    """
    kernel = "mhc.head_compute_mix"
    mix, out = taken(tokens, kernel, "input_mix", input_mix, *_MIX), taken(tokens, kernel, "output_mix", output_mix, *_MIX)
    _head((mix, mhc_scale, mhc_base), (), (mhc_pre_eps,), (out,))


def mhc_head_compute_mix_bwd(
    output_mix_grad: torch.Tensor,
    input_mix: torch.Tensor,
    mhc_scale: torch.Tensor,
    mhc_base: torch.Tensor,
    input_mix_grad: torch.Tensor,
    mhc_scale_grad_partial: torch.Tensor,
    mhc_base_grad_partial: torch.Tensor,
    num_sms: int,
    token_block_size: int = 0,
) -> None:
    """Write the gradient of ``mhc_head_compute_mix_fwd``'s input, and for scale and base sums over the tokens of ``num_sms`` CTAs.

    token_block_size decides nothing here. The sum of mhc_scale_grad_partial and of mhc_base_grad_partial over their rows is the gradient. Which tokens a row has is not promised.
    Shapes: output_mix_grad, input_mix, input_mix_grad (..., m), mhc_scale (1), mhc_base (m), mhc_scale_grad_partial (num_sms, 1),
    mhc_base_grad_partial (num_sms, m), m = 4; no tokens are allowed, then the sums are 0.
    Dtypes: float32.  Layout: contiguous; rows of the sums may lie apart.
    Raises: ArgumentError, NoVariantError, LaunchError.
    """
    kernel = "mhc.head_compute_mix_bwd"
    if mhc_scale_grad_partial.shape[:1] != (num_sms,):
        raise ArgumentError(
            f"{kernel}: mhc_scale_grad_partial has shape {tuple(mhc_scale_grad_partial.shape)}, expected ({num_sms}, 1)",
            kernel=kernel,
        )
    grad, mix = (
        taken(tokens, kernel, "output_mix_grad", output_mix_grad, *_MIX),
        taken(tokens, kernel, "input_mix", input_mix, *_MIX),
    )
    sums, out = (mhc_scale_grad_partial, mhc_base_grad_partial), taken(tokens, kernel, "input_mix_grad", input_mix_grad, *_MIX)
    _head_bwd((grad, mix, mhc_scale, mhc_base, *sums), (), (), (out,))
    if mix.numel() == 0:  # nothing was launched
        for partial in sums:
            partial.zero_()


def mhc_pre_split_mixes_fwd(
    input_mixes: torch.Tensor,
    mhc_scale: torch.Tensor,
    mhc_base: torch.Tensor,
    pre_layer_mix: torch.Tensor,
    post_layer_mix: torch.Tensor,
    comb_res_mix: torch.Tensor,
    mhc_post_mult_value: float,
    mhc_pre_eps: float,
) -> None:
    """Write the mixes of a layer's input, of its output and of the streams: three parts of ``input_mixes``, each scaled and shifted.

    With a = input_mixes * mhc_scale[part] + mhc_base: pre_layer_mix = sigmoid(a) + mhc_pre_eps, post_layer_mix = sigmoid(a) *
    mhc_post_mult_value, comb_res_mix = a.
    Shapes: input_mixes (..., m * (m + 2)), mhc_scale (3), mhc_base (m * (m + 2)), pre_layer_mix and post_layer_mix (..., m) or
    (..., m, 1), comb_res_mix (..., m * m) or (..., m, m), m = 4; no tokens are allowed.  Dtypes: float32.  Layout: contiguous.
    Raises: ArgumentError, NoVariantError, LaunchError.
    """
    kernel = "mhc.pre_split_mixes"
    outs = (
        taken(tokens, kernel, "pre_layer_mix", pre_layer_mix, *_MIX),
        taken(tokens, kernel, "post_layer_mix", post_layer_mix, *_MIX),
        taken(tokens, kernel, "comb_res_mix", comb_res_mix, *_COMB),
    )
    mixes = taken(tokens, kernel, "input_mixes", input_mixes, *_ALL)
    _split((mixes, mhc_scale, mhc_base), (), (mhc_post_mult_value, mhc_pre_eps), outs)


def mhc_pre_split_mixes_bwd(
    pre_layer_mix_grad: torch.Tensor,
    post_layer_mix_grad: torch.Tensor,
    comb_res_mix_grad: torch.Tensor,
    input_mixes: torch.Tensor,
    post_layer_mix: torch.Tensor,
    mhc_scale: torch.Tensor,
    mhc_base: torch.Tensor,
    input_mixes_grad: torch.Tensor,
    mhc_scale_grad: torch.Tensor,
    mhc_base_grad: torch.Tensor,
    mhc_post_mult_value: float,
) -> None:
    """Write the gradients of ``mhc_pre_split_mixes_fwd`` with respect to input_mixes, mhc_scale and mhc_base.

    ``post_layer_mix`` is what the forward wrote. The order of the sums over tokens depends on their number and that of the SMs in
    use alone.
    Shapes: as there; a gradient has the shape of its tensor. Without tokens those of scale and base are 0.
    Dtypes: float32.  Layout: contiguous.
    Raises: ArgumentError, NoVariantError, LaunchError.
    """
    kernel = "mhc.pre_split_mixes_bwd"
    mixes = tokens(kernel, "input_mixes", input_mixes, *_ALL)
    given = (
        taken(tokens, kernel, "pre_layer_mix_grad", pre_layer_mix_grad, *_MIX),
        taken(tokens, kernel, "post_layer_mix_grad", post_layer_mix_grad, *_MIX),
        taken(tokens, kernel, "comb_res_mix_grad", comb_res_mix_grad, *_COMB),
        mixes,
        taken(tokens, kernel, "post_layer_mix", post_layer_mix, *_MIX),
    )
    partial = partial_sums(mixes)
    outs = (taken(tokens, kernel, "input_mixes_grad", input_mixes_grad, *_ALL), mhc_scale_grad, mhc_base_grad)
    _split_bwd((*given, mhc_scale, mhc_base, partial), (), (partial.shape[0], mhc_post_mult_value), outs)
    if mixes.shape[0] == 0:  # nothing was launched
        for total in (mhc_scale_grad, mhc_base_grad):
            total.zero_()


def partial_sums(mixes: torch.Tensor) -> torch.Tensor:
    """Return room for the sums of the CTAs that work on ``mixes``, for ``mhc.pre_split_mixes_bwd``."""
    count = _CTAS_PER_SM * get_num_sms(mixes.get_device()) if mixes.is_cuda else 1
    return mixes.new_empty((count, _SUMS), dtype=torch.float32)

"""A layer's input and mixes in two launches, for inference."""

from __future__ import annotations

import torch

from tkbuild.ops.mhc.shapes import STREAMS
from tkbuild.ops.modeling.mhc.norm_fn import check_fn, flat_streams
from tkbuild.runtime.op import kernel_op

__all__ = ["mhc_pre_big_fuse"]

_KERNEL = "mhc.pre_big_fuse"
_mul = kernel_op("mhc.pre_norm_fn_mul")
_fuse = kernel_op(_KERNEL)


def mhc_pre_big_fuse(
    residual: torch.Tensor,
    fn: torch.Tensor,
    mhc_scale: torch.Tensor,
    mhc_base: torch.Tensor,
    rms_eps: float,
    mhc_pre_eps: float,
    mhc_sinkhorn_eps: float,
    mhc_post_mult_value: float,
    sinkhorn_repeat: int,
    n_splits: int = 16,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (post_mix, comb_mix, layer_input): what ``mhc_pre_norm_fn``, ``mhc_pre_split_mixes``, ``sinkhorn_normalize`` and
    ``mhc_pre_apply_mix`` give, bit for bit, without gradients.

    Shapes: residual (..., m, H), fn (24, m * H), mhc_scale (3), mhc_base (24) -> (..., m, 1), (..., m, m), (..., H); m = 4, H a
    multiple of 64, n_splits up to 255.  Dtypes: residual and layer_input bfloat16, the others float32.
    Layout: any; what is not contiguous is copied.  Raises: ArgumentError, NoVariantError, LaunchError.
    """
    x = flat_streams(_KERNEL, residual.detach())
    out_mul, sqrsum = _mul((x, check_fn(_KERNEL, fn.detach())), (), (1, n_splits))
    values = (rms_eps, mhc_pre_eps, mhc_sinkhorn_eps, mhc_post_mult_value, sinkhorn_repeat)
    streams = x.view(x.shape[0], *residual.shape[-2:])
    given = (out_mul.squeeze(2), sqrsum.squeeze(2), mhc_scale.detach(), mhc_base.detach(), streams)
    post, comb, layer_input = _fuse(given, (), values)
    lead = residual.shape[:-2]
    return post.view(*lead, STREAMS, 1), comb.view(*lead, STREAMS, STREAMS), layer_input.view(*lead, residual.shape[-1])

"""All that lies between the product with fn and a layer's input, in one launch, for inference."""

from __future__ import annotations

import torch

from tkbuild.errors import ArgumentError
from tkbuild.ops.mhc.shapes import STREAMS, rows, streams, taken, tokens
from tkbuild.runtime.op import kernel_op

__all__ = ["mhc_pre_big_fuse_fwd"]

_fuse = kernel_op("mhc.pre_big_fuse")


def mhc_pre_big_fuse_fwd(
    gemm_out_mul: torch.Tensor,
    gemm_out_sqrsum: torch.Tensor,
    mhc_scale: torch.Tensor,
    mhc_base: torch.Tensor,
    residual: torch.Tensor,
    post_mix: torch.Tensor,
    comb_mix: torch.Tensor,
    layer_input: torch.Tensor,
    rms_eps: float,
    mhc_pre_eps: float,
    mhc_sinkhorn_eps: float,
    mhc_post_mult_value: float,
    sinkhorn_repeat: int,
    n_splits: int = 16,
) -> None:
    """Write a layer's input and the mixes behind it, from the partial products of the residual with fn.

    Bit for bit what ``mhc_reduce_partials_and_rmsnorm_fwd`` (one group of m * H columns), ``mhc_pre_split_mixes_fwd``,
    ``mhc_sinkhorn_fwd`` and ``mhc_pre_apply_mix_fwd`` write one after the other.
    Shapes: gemm_out_mul (n_splits, n, 24), gemm_out_sqrsum (n_splits, n), mhc_scale (3), mhc_base (24), residual (..., m, H) with n
    tokens, post_mix (..., m) or (..., m, 1), comb_mix (..., m, m) or (..., m * m), layer_input (..., H); m = 4, H a multiple of 8; n may be 0.
    Dtypes: residual and layer_input bfloat16, the others float32.  Layout: contiguous.
    Raises: ArgumentError, NoVariantError, LaunchError.
    """
    kernel = "mhc.pre_big_fuse"
    if gemm_out_mul.shape[:1] != (n_splits,):
        raise ArgumentError(
            f"{kernel}: gemm_out_mul has shape {tuple(gemm_out_mul.shape)}, expected (n_splits, n, 24) with n_splits = {n_splits}",
            kernel=kernel,
        )
    outs = (
        taken(tokens, kernel, "post_mix", post_mix, (STREAMS, 1), (STREAMS,)),
        taken(tokens, kernel, "comb_mix", comb_mix, (STREAMS, STREAMS), (STREAMS * STREAMS,)),
        taken(rows, kernel, "layer_input", layer_input),
    )
    given = (gemm_out_mul, gemm_out_sqrsum, mhc_scale, mhc_base, taken(streams, kernel, "residual", residual))
    _fuse(given, (), (rms_eps, mhc_pre_eps, mhc_sinkhorn_eps, mhc_post_mult_value, sinkhorn_repeat), outs)

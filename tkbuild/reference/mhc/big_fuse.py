"""Reference of all that lies between the product with fn and a layer's input, for inference."""

from __future__ import annotations

import torch

from tkbuild.reference.mhc.norm_fn import reduce_partials_and_rmsnorm
from tkbuild.reference.mhc.recompute import mixed
from tkbuild.reference.mhc.sinkhorn import sinkhorn


def pre_big_fuse(
    gemm_out_mul: torch.Tensor,
    gemm_out_sqrsum: torch.Tensor,
    mhc_scale: torch.Tensor,
    mhc_base: torch.Tensor,
    residual: torch.Tensor,
    *,
    rms_eps: float,
    mhc_pre_eps: float,
    mhc_sinkhorn_eps: float,
    mhc_post_mult_value: float,
    sinkhorn_repeat: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (post_mix, comb_mix, layer_input) from the partial products of the residual with fn.

    The mixes are normalised as one group of m * H columns, split into pre (m), post (m) and comb (m * m), each times its scale plus
    its base. pre = sigmoid + mhc_pre_eps; post = sigmoid * mhc_post_mult_value; comb goes through ``sinkhorn``; layer_input is the
    sum of the streams times pre, rounded to bfloat16.
    Shapes: gemm_out_mul (n_splits, n, m * (m + 2)), gemm_out_sqrsum (n_splits, n), mhc_scale (3), mhc_base (m * (m + 2)),
    residual (n, m, H) -> (n, m), (n, m * m), (n, H).  Dtypes: residual and layer_input bfloat16, the others float32.
    """
    n, m, columns = residual.shape
    partials = (gemm_out_mul[:, :, None], gemm_out_sqrsum[:, :, None])
    _, _, mixes = reduce_partials_and_rmsnorm(*partials, rms_group_size=m * columns, rms_eps=rms_eps)
    sizes = (m, m, m * m)
    parts = zip(mixes.split(sizes, dim=1), mhc_base.split(sizes), mhc_scale, strict=True)
    pre, post, comb = (mix * scale + base for mix, base, scale in parts)
    comb = sinkhorn(comb.view(n, m, m), repeat=sinkhorn_repeat, eps=mhc_sinkhorn_eps)
    layer_input = mixed(torch.sigmoid(pre) + mhc_pre_eps, residual)
    return torch.sigmoid(post) * mhc_post_mult_value, comb.view(n, m * m), layer_input

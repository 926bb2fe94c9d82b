"""References of the residual streams behind a layer, and their gradients."""

from __future__ import annotations

import torch

from tkbuild.reference.mhc.recompute import mixed, updated

_CHUNK_TOKENS = 1 << 11

Results = tuple[torch.Tensor, ...]


def post(x: torch.Tensor, residual: torch.Tensor, post_layer_mix: torch.Tensor, comb_res_mix: torch.Tensor) -> torch.Tensor:
    """Return post_layer_mix[o] * x + sum of comb_res_mix[i, o] * residual[i], by fused multiply-adds in increasing i, in x's dtype.

    Shapes: x (n, H), residual (n, m, H), post_layer_mix (n, m), comb_res_mix (n, m, m) -> (n, m, H).
    Dtypes: x, residual and result bfloat16, mixes float32; or all float64.
    """
    chunks = zip(*(t.split(_CHUNK_TOKENS) for t in (x, residual, post_layer_mix, comb_res_mix)), strict=True)
    return torch.cat([updated(*chunk) for chunk in chunks])


def post_bwd(
    x: torch.Tensor, residual: torch.Tensor, post_layer_mix: torch.Tensor, comb_res_mix: torch.Tensor, d_o: torch.Tensor
) -> Results:
    """Return the gradients of ``post`` with respect to x, residual, post_layer_mix and comb_res_mix from that of its result.

    d_x is the sum of post_layer_mix[o] * d_o[o], d_residual[i] that of comb_res_mix[i, o] * d_o[o], both by fused multiply-adds in
    increasing o, in x's dtype; d_post[o] and d_comb[i, o] are the sums of d_o[o] times x and residual[i] over the columns, here in float64.
    Shapes: d_o (n, m, H); the others as in ``post``.
    """
    chunks = zip(*(t.split(_CHUNK_TOKENS) for t in (x, residual, post_layer_mix, comb_res_mix, d_o)), strict=True)
    parts = [_gradients(*chunk) for chunk in chunks]
    d_x, d_residual, d_post, d_comb = (torch.cat(list(part)) for part in zip(*parts, strict=True))
    return d_x, d_residual, d_post, d_comb


def _gradients(
    x: torch.Tensor, residual: torch.Tensor, post_layer_mix: torch.Tensor, comb_res_mix: torch.Tensor, d_o: torch.Tensor
) -> Results:
    dtype, wide = comb_res_mix.dtype, d_o.double()
    d_residual = torch.stack([mixed(mix, d_o) for mix in comb_res_mix.unbind(dim=1)], dim=1)
    d_post = torch.einsum("nh,noh->no", x.double(), wide).to(dtype)
    d_comb = torch.einsum("nih,noh->nio", residual.double(), wide).to(dtype)
    return mixed(post_layer_mix, d_o), d_residual, d_post, d_comb

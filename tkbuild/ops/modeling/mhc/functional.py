"""What stands before a layer and before the head of a model: several operators in a row."""

from __future__ import annotations

import torch

from tkbuild.errors import ArgumentError
from tkbuild.ops.mhc.shapes import STREAMS
from tkbuild.ops.modeling.mhc.apply_mix import mhc_pre_apply_mix
from tkbuild.ops.modeling.mhc.big_fuse import mhc_pre_big_fuse
from tkbuild.ops.modeling.mhc.mixes import mhc_head_compute_mix, mhc_pre_split_mixes
from tkbuild.ops.modeling.mhc.norm_fn import check_fn, mhc_pre_norm_fn, with_norm_weight
from tkbuild.ops.modeling.mhc.sinkhorn import sinkhorn_normalize

__all__ = ["mhc_head", "mhc_pre"]

_MIXES = STREAMS * (STREAMS + 2)


def mhc_pre(
    residual: torch.Tensor,
    fn: torch.Tensor,
    scale: torch.Tensor,
    base: torch.Tensor,
    *,
    norm_weight: torch.Tensor | None = None,
    norm_eps: float = 1e-6,
    mhc_mult: int = STREAMS,
    post_mult_value: float = 1.0,
    pre_eps: float = 1e-6,
    sinkhorn_eps: float = 1e-6,
    sinkhorn_repeat: int = 10,
    n_splits: int = 16,
) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
    """Return (layer_input, (post_mix, comb_mix)): what a layer takes, and what ``mhc_post`` takes behind it.

    Differentiable once with respect to all tensors; where gradients are disabled, fewer launches give the same bits. Release 1.0 ignores
    ``norm_weight`` there; here it counts in both cases.
    Shapes: residual (..., m, H), fn (24, m * H), scale (3), base (24), norm_weight (m * H) -> (..., H), (..., m, 1), (..., m, m);
    m = mhc_mult = 4, H a multiple of 64, n_splits up to 255.  Dtypes: residual and layer_input bfloat16, the others float32.
    Raises: ArgumentError, NoVariantError, LaunchError.
    """
    _check_mult("mhc_pre", residual, mhc_mult)
    if not torch.is_grad_enabled():
        merged = with_norm_weight(check_fn("mhc_pre", fn), norm_weight)
        eps = (norm_eps, pre_eps, sinkhorn_eps)
        post, comb, layer_input = mhc_pre_big_fuse(residual, merged, scale, base, *eps, post_mult_value, sinkhorn_repeat, n_splits)
        return layer_input, (post, comb)
    mixes = mhc_pre_norm_fn(residual, fn, norm_weight, norm_eps, n_splits=n_splits)
    pre, post, comb = mhc_pre_split_mixes(mixes, scale, base, mhc_mult, post_mult_value, pre_eps)
    comb = sinkhorn_normalize(comb, sinkhorn_repeat, sinkhorn_eps)
    return mhc_pre_apply_mix(residual, pre), (post, comb)


def mhc_head(
    residual: torch.Tensor,
    fn: torch.Tensor,
    scale: torch.Tensor,
    base: torch.Tensor,
    *,
    norm_weight: torch.Tensor | None = None,
    norm_eps: float = 1e-6,
    mhc_mult: int = STREAMS,
    pre_eps: float = 1e-6,
    n_splits: int = 16,
) -> torch.Tensor:
    """Return the hidden states that a model's head takes: the residual's streams times mixes of their own.

    Differentiable once with respect to all tensors.
    Shapes: residual (..., m, H), fn (m, m * H), scale (1), base (m), norm_weight (m * H) -> (..., H); m = mhc_mult = 4, H a multiple of
    64, n_splits up to 255.  Dtypes: residual and result bfloat16, the others float32.
    Raises: ArgumentError, NoVariantError, LaunchError.
    """
    _check_mult("mhc_head", residual, mhc_mult)
    if fn.dim() != 2 or fn.shape[0] != mhc_mult:
        raise ArgumentError(f"mhc_head: fn has shape {tuple(fn.shape)}, expected ({mhc_mult}, m * H)", kernel="mhc_head")
    padded = torch.nn.functional.pad(fn, (0, 0, 0, _MIXES - mhc_mult))
    mixes = mhc_pre_norm_fn(residual, padded, norm_weight, norm_eps, n_splits=n_splits)[..., :mhc_mult]
    mix = mhc_head_compute_mix(mixes, scale, base, pre_eps)
    return mhc_pre_apply_mix(residual, mix[..., None])


def _check_mult(name: str, residual: torch.Tensor, mhc_mult: int) -> None:
    if mhc_mult != STREAMS or residual.dim() < 2 or residual.shape[-2] != STREAMS:
        raise ArgumentError(
            f"{name}: mhc_mult is {mhc_mult} and residual has shape {tuple(residual.shape)}, expected {STREAMS} and (..., {STREAMS}, H)",
            kernel=name,
        )

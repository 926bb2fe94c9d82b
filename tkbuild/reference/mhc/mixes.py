"""References of the mixes: sigmoids and affine maps of what a layer's product gives, and their gradients.

Inputs may be float64 throughout, for checks of gradients. Sums over tokens are taken in float64.
"""

from __future__ import annotations

import torch

from tkbuild.reference.arithmetic import fma

#: Tokens whose sums the head's kernel adds to one row of partial sums.
_BLOCK_TOKENS = 128
_CHUNK_TOKENS = 1 << 20

Results = tuple[torch.Tensor, ...]


def head_compute_mix(
    input_mix: torch.Tensor, mhc_scale: torch.Tensor, mhc_base: torch.Tensor, *, mhc_pre_eps: float
) -> torch.Tensor:
    """Return sigmoid(input_mix * mhc_scale[0] + mhc_base) + mhc_pre_eps.

    Shapes: input_mix (n, m), mhc_scale (1), mhc_base (m) -> (n, m).  Dtypes: float32.
    """
    return torch.sigmoid(_affine(input_mix, mhc_scale[0], mhc_base)) + mhc_pre_eps


def head_compute_mix_bwd(
    output_mix_grad: torch.Tensor,
    input_mix: torch.Tensor,
    mhc_scale: torch.Tensor,
    mhc_base: torch.Tensor,
    mhc_scale_grad_partial: torch.Tensor,
    mhc_base_grad_partial: torch.Tensor,
) -> Results:
    """Return (mhc_scale_grad_partial, mhc_base_grad_partial, input_mix_grad) of ``head_compute_mix``.

    Row p of the partial sums has the blocks of 128 tokens with the numbers p, p + P, p + 2 P and so on.
    Shapes: output_mix_grad, input_mix (n, m), mhc_scale (1), mhc_base (m), mhc_scale_grad_partial (P, 1), mhc_base_grad_partial (P, m).
    """
    rows, columns = mhc_base_grad_partial.shape
    sums = input_mix.new_zeros((rows, 1 + columns), dtype=torch.float64)
    input_mix_grad = torch.empty_like(input_mix)
    for first in range(0, input_mix.shape[0], _CHUNK_TOKENS):
        chunk = slice(first, first + _CHUNK_TOKENS)
        grad = _sigmoid_grad(output_mix_grad[chunk], input_mix[chunk], mhc_scale[0], mhc_base)
        input_mix_grad[chunk] = grad * mhc_scale[0]
        of_scale = (grad.double() * input_mix[chunk].double()).sum(dim=1, keepdim=True)
        owners = torch.arange(first, first + grad.shape[0], device=grad.device) // _BLOCK_TOKENS % rows
        sums.index_add_(0, owners, torch.cat((of_scale, grad.double()), dim=1))
    return sums[:, :1].to(input_mix.dtype), sums[:, 1:].to(input_mix.dtype), input_mix_grad


def pre_split_mixes(
    input_mixes: torch.Tensor, mhc_scale: torch.Tensor, mhc_base: torch.Tensor, *, mhc_post_mult_value: float, mhc_pre_eps: float
) -> Results:
    """Return (pre, post, comb): the mixes times their part's scale plus base, sigmoid + mhc_pre_eps of pre, sigmoid * mhc_post_mult_value of post.

    Shapes: input_mixes (n, m * (m + 2)), mhc_scale (3), mhc_base (m * (m + 2)) -> (n, m), (n, m), (n, m * m), m = 4.
    Dtypes: float32.
    """
    parts = zip(_parts(input_mixes), mhc_scale, _parts(mhc_base), strict=True)
    pre, post, comb = (_affine(mixes, scale, base) for mixes, scale, base in parts)
    return torch.sigmoid(pre) + mhc_pre_eps, torch.sigmoid(post) * mhc_post_mult_value, comb


def pre_split_mixes_bwd(
    pre_layer_mix_grad: torch.Tensor,
    post_layer_mix_grad: torch.Tensor,
    comb_res_mix_grad: torch.Tensor,
    input_mixes: torch.Tensor,
    post_layer_mix: torch.Tensor,
    mhc_scale: torch.Tensor,
    mhc_base: torch.Tensor,
    _partial: torch.Tensor | None = None,
    *,
    num_partials: int = 1,
    mhc_post_mult_value: float,
) -> Results:
    """Return the gradients of ``pre_split_mixes`` with respect to input_mixes, mhc_scale and mhc_base.

    The gradient of the second sigmoid comes from its saved result: g * post * (1 - post / mhc_post_mult_value).
    Shapes: as in ``pre_split_mixes``; the gradients are those of its results.  Dtypes: float32.
    """
    del num_partials  # the order of a sum that is taken in float64
    given = (pre_layer_mix_grad, post_layer_mix_grad, comb_res_mix_grad, input_mixes, post_layer_mix)
    scale_grad, base_grad = mhc_scale.new_zeros(3, dtype=torch.float64), mhc_base.new_zeros(mhc_base.shape, dtype=torch.float64)
    chunks = []
    for pre_grad, post_grad, comb_grad, mixes, post in zip(*(t.split(_CHUNK_TOKENS) for t in given), strict=True):
        grads = (
            _sigmoid_grad(pre_grad, _parts(mixes)[0], mhc_scale[0], _parts(mhc_base)[0]),
            post_grad * post * (1 - post / mhc_post_mult_value),
            comb_grad,
        )
        scale_grad += torch.stack([(grad.double() * mix.double()).sum() for grad, mix in zip(grads, _parts(mixes), strict=True)])
        base_grad += torch.cat([grad.double().sum(dim=0) for grad in grads])
        chunks.append(torch.cat([grad * scale for grad, scale in zip(grads, mhc_scale, strict=True)], dim=1))
    return torch.cat(chunks), scale_grad.to(mhc_scale.dtype), base_grad.to(mhc_base.dtype)


def _parts(mixes: torch.Tensor) -> Results:
    """Pre, post and comb of four streams."""
    return mixes[..., :4], mixes[..., 4:8], mixes[..., 8:]


def _affine(mixes: torch.Tensor, scale: torch.Tensor, base: torch.Tensor) -> torch.Tensor:
    return mixes * scale + base if mixes.dtype == torch.float64 else fma(mixes, scale, base)


def _sigmoid_grad(grad: torch.Tensor, mixes: torch.Tensor, scale: torch.Tensor, base: torch.Tensor) -> torch.Tensor:
    s = torch.sigmoid(_affine(mixes, scale, base))
    return grad * s * (1 - s)

"""References of the mixes before a layer: the product of the residual with fn, and its normalisation by the root mean square.

All sums are taken in float64. Inputs may also be float64 throughout, for checks of gradients; then nothing is rounded.
"""

from __future__ import annotations

import itertools

import torch

#: Columns that are dealt out to splits together.
BLOCK = 64
_CHUNK_ROWS = 1 << 14
_TF32_HALF, _TF32_MASK = 0x1000, ~0x1FFF

Results = tuple[torch.Tensor, ...]


def round_to_tf32(x: torch.Tensor) -> torch.Tensor:
    """Return float32 ``x`` rounded to the 11 significant bits of TF32, ties away from zero; NaN stays NaN, float64 what it is."""
    if x.dtype != torch.float32:
        return x
    rounded = ((x.contiguous().view(torch.int32) + _TF32_HALF) & _TF32_MASK).view(torch.float32)
    return torch.where(x.isnan(), x, rounded)


def pre_norm_fn_mul(x: torch.Tensor, fn: torch.Tensor, *, num_groups: int, num_splits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (out_mul, sqrsum): products of rows of ``x`` with those of ``fn``, and sums of squares, by group and by split.

    The columns of a group are blocks of 64; split s has those from s * blocks // num_splits to (s + 1) * blocks // num_splits.
    Shapes: x (n, K), fn (24, K), K = num_groups * Kg -> out_mul (num_splits, n, num_groups, 24), sqrsum (num_splits, n, num_groups).
    Dtypes: x bfloat16, fn and results float32.
    """
    bounds = _split_bounds(x.shape[1] // num_groups, num_splits)
    weights = fn.double().unflatten(1, (num_groups, -1))
    products = fn.new_zeros((num_splits, x.shape[0], num_groups, fn.shape[0]))
    squares = fn.new_zeros((num_splits, x.shape[0], num_groups))
    for first in range(0, x.shape[0], _CHUNK_ROWS):
        chunk = slice(first, first + _CHUNK_ROWS)
        rows = x[chunk].double().unflatten(1, (num_groups, -1))
        for s, columns in enumerate(slice(a, b) for a, b in itertools.pairwise(bounds)):
            products[s, chunk] = torch.einsum("ngk,jgk->ngj", rows[..., columns], weights[..., columns]).to(fn.dtype)
            squares[s, chunk] = rows[..., columns].square().sum(dim=2).to(fn.dtype)
    return products, squares


def pre_norm_fn_mul_bwd(
    out_mul_grad: torch.Tensor,
    sqrsum_grad: torch.Tensor,
    x: torch.Tensor,
    fn: torch.Tensor,
    x_grad: torch.Tensor | None,
    fn_grad: torch.Tensor | None,
    _partial: torch.Tensor | None = None,
    *,
    num_partials: int = 1,
    accumulate: int = 0,
) -> Results:
    """Return those of (x_grad, fn_grad) that are wanted, from the gradients of ``pre_norm_fn_mul``'s results summed over splits.

    x_grad = out_mul_grad . fn + 2 * x * sqrsum_grad, with ``accumulate`` plus what was there; fn_grad = out_mul_grad^T . x, by group.
    Shapes: out_mul_grad (n, g, 24), sqrsum_grad (n, g), x and x_grad (n, K), fn and fn_grad (24, K).
    Dtypes: x and x_grad bfloat16, the others float32; for x_grad out_mul_grad and fn are rounded to TF32.
    """
    del num_partials  # the order of a sum that is taken in float64
    groups = out_mul_grad.shape[1]
    grads, rounded = out_mul_grad.double(), round_to_tf32(out_mul_grad).double()
    weights = round_to_tf32(fn).double().unflatten(1, (groups, -1))
    result_x = None if x_grad is None else torch.empty_like(x_grad)
    total = weights.new_zeros(weights.shape)
    for first in range(0, x.shape[0], _CHUNK_ROWS):
        chunk = slice(first, first + _CHUNK_ROWS)
        rows = x[chunk].double().unflatten(1, (groups, -1))
        total += torch.einsum("ngj,ngk->jgk", grads[chunk], rows)
        if x_grad is not None and result_x is not None:
            rows_grad = torch.einsum("ngj,jgk->ngk", rounded[chunk], weights) + 2 * rows * sqrsum_grad[chunk, :, None].double()
            old = x_grad[chunk].double() if accumulate else 0.0
            result_x[chunk] = (rows_grad.flatten(1) + old).to(x.dtype)
    result_fn = None if fn_grad is None else total.flatten(1).to(fn.dtype)
    return tuple(result for result in (result_x, result_fn) if result is not None)


def reduce_partials_and_rmsnorm(
    out_mul_splitted: torch.Tensor, sqrsum_splitted: torch.Tensor, *, rms_group_size: int, rms_eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (out_mul, sqrsum, out): the sums over splits, and sum over groups of out_mul / sqrt(sqrsum / rms_group_size + rms_eps).

    The splits are added in increasing order.
    Shapes: out_mul_splitted (n_splits, n, g, 24), sqrsum_splitted (n_splits, n, g) -> (n, g, 24), (n, g), (n, 24).  Dtypes: float32.
    """
    out_mul, sqrsum = torch.zeros_like(out_mul_splitted[0]), torch.zeros_like(sqrsum_splitted[0])
    for products, squares in zip(out_mul_splitted, sqrsum_splitted, strict=True):
        out_mul, sqrsum = out_mul + products, sqrsum + squares
    factor = torch.rsqrt(sqrsum / rms_group_size + rms_eps)
    return out_mul, sqrsum, (out_mul * factor[..., None]).sum(dim=1)


def reduce_partials_and_rmsnorm_bwd(
    out_grad: torch.Tensor, out_mul: torch.Tensor, sqrsum: torch.Tensor, *, rms_group_size: int, rms_eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (out_mul_grad, sqrsum_grad) from the gradient of the normalised mixes.

    With r = 1 / sqrt(sqrsum / rms_group_size + rms_eps): out_mul_grad = out_grad * r, sqrsum_grad = sum(out_grad * out_mul) * r /
    (sqrsum + rms_eps * rms_group_size) / -2.
    Shapes: out_grad (n, 24), out_mul (n, g, 24), sqrsum (n, g) -> (n, g, 24), (n, g).  Dtypes: float32.
    """
    factor = torch.rsqrt(sqrsum / rms_group_size + rms_eps)
    dots = (out_grad[:, None] * out_mul).sum(dim=2)
    return out_grad[:, None] * factor[..., None], dots * factor / (sqrsum + rms_eps * rms_group_size) / -2


def _split_bounds(columns: int, splits: int) -> list[int]:
    blocks = -(-columns // BLOCK)
    return [min(s * blocks // splits * BLOCK, columns) for s in range(splits + 1)]

"""The mixes before a layer: products of the residual with fn, normalised by the root mean square."""

from __future__ import annotations

import torch

from tkbuild.errors import ArgumentError
from tkbuild.runtime.op import kernel_op

__all__ = [
    "fn_partials",
    "mhc_pre_norm_fn_mul_bwd",
    "mhc_pre_norm_fn_mul_fwd",
    "mhc_reduce_partials_and_rmsnorm_bwd",
    "mhc_reduce_partials_and_rmsnorm_fwd",
]

_mul = kernel_op("mhc.pre_norm_fn_mul")
_mul_bwd = kernel_op("mhc.pre_norm_fn_mul_bwd")
_normalise = kernel_op("mhc.reduce_partials_and_rmsnorm")
_normalise_bwd = kernel_op("mhc.reduce_partials_and_rmsnorm_bwd")

_CTA_COLUMNS, _CTA_TOKENS = 256, 32
#: CTAs of a backward product that an H200 runs at one time, and how often it is filled with them. Elsewhere only the speed depends on it.
_PLACES, _FILLINGS = 264, (1, 2, 3, 4)


def mhc_pre_norm_fn_mul_fwd(
    x: torch.Tensor, fn: torch.Tensor, out_mul_splitted: torch.Tensor, sqrsum_splitted: torch.Tensor
) -> None:
    """Write partial products of the rows of ``x`` with those of ``fn``, and partial sums of their squares, by group of columns.

    fn is taken as the sum of two bfloat16, 17 or more significant bits; sums are float32. The columns of a group are blocks of 64, dealt
    out to the splits in order. The result depends on n and n_splits, not on the device. NaN and infinities of x concern their row only;
    an infinity may give NaN.
    Shapes: x (n, K), fn (24, K), out_mul_splitted (n_splits, n, g, 24), sqrsum_splitted (n_splits, n, g), K a multiple of 256 * g,
    g up to 256, n_splits up to 255; n may be 0.
    Dtypes: x bfloat16, the others float32.  Layout: contiguous, but the rows of x, which may lie multiples of 8 elements apart.
    Raises: ArgumentError, NoVariantError, LaunchError.
    """
    if out_mul_splitted.dim() != 4:
        raise ArgumentError(
            f"mhc.pre_norm_fn_mul: out_mul_splitted has {out_mul_splitted.dim()} dimensions, expected 4: (n_splits, n, g, 24)",
            kernel="mhc.pre_norm_fn_mul",
        )
    splits, _, groups, _ = out_mul_splitted.shape
    _mul((x, fn), (), (groups, splits), (out_mul_splitted, sqrsum_splitted))


def mhc_pre_norm_fn_mul_bwd(
    out_mul_grad: torch.Tensor,
    sqrsum_grad: torch.Tensor,
    x: torch.Tensor,
    fn: torch.Tensor,
    x_grad: torch.Tensor | None,
    fn_grad: torch.Tensor | None,
    accumulate: bool = True,
) -> None:
    """Add out_mul_grad . fn + 2 * x * sqrsum_grad to ``x_grad``, and write out_mul_grad^T . x into ``fn_grad``; None leaves one out.

    Without ``accumulate`` x_grad is overwritten. For x_grad out_mul_grad and fn are rounded to TF32, ties away from zero, for
    fn_grad out_mul_grad is taken as the sum of two bfloat16; sums are float32, in an order that the shapes decide; x_grad is rounded once.
    Shapes: out_mul_grad (n, g, 24), sqrsum_grad (n, g), x and x_grad (n, K), fn and fn_grad (24, K); without rows fn_grad is 0.
    Dtypes: x and x_grad bfloat16, the others float32.  Layout: as ``mhc_pre_norm_fn_mul_fwd``, x_grad as x.
    Raises: ArgumentError, NoVariantError, LaunchError.
    """
    if x_grad is None and fn_grad is None:
        return
    partial = fn_partials(x, fn, fn_grad is not None)
    given = (out_mul_grad, sqrsum_grad, x, fn, x_grad, fn_grad, partial)
    _mul_bwd(given, (), (partial.shape[0], int(accumulate)))


def fn_partials(x: torch.Tensor, fn: torch.Tensor, wanted: bool) -> torch.Tensor:
    """Return room for the partial sums of fn's gradient, by range of tokens; without columns where it is not ``wanted``."""
    ranges = max(1, min(_full_ranges(max(1, x.shape[-1] // _CTA_COLUMNS)), -(-x.shape[0] // _CTA_TOKENS)))
    return fn.new_empty((ranges, fn.shape[0], fn.shape[1] if wanted else 0), dtype=torch.float32)


def _full_ranges(column_ctas: int) -> int:
    """The fewest ranges of tokens that leave not many more places empty in the last filling than any number does: each costs bytes."""
    used = {filling: filling * _PLACES // column_ctas for filling in _FILLINGS}
    share = {filling: ranges * column_ctas / (filling * _PLACES) for filling, ranges in used.items()}
    return next(ranges for filling, ranges in used.items() if share[filling] >= max(share.values()) - 0.09)


def mhc_reduce_partials_and_rmsnorm_fwd(
    out_mul_splitted: torch.Tensor,
    sqrsum_splitted: torch.Tensor,
    out_mul: torch.Tensor,
    sqrsum: torch.Tensor,
    out: torch.Tensor,
    rms_group_size: int,
    rms_eps: float,
    n_splits: int,
) -> None:
    """Write the sums over splits, in increasing order, and the mixes: sum over groups of out_mul / sqrt(sqrsum / rms_group_size + rms_eps).

    Shapes: out_mul_splitted (n_splits, n, g, 24), sqrsum_splitted (n_splits, n, g), out_mul (n, g, 24), sqrsum (n, g), out (n, 24);
    n may be 0.  Dtypes: float32.  Layout: contiguous.
    Raises: ArgumentError, NoVariantError, LaunchError.
    """
    if out_mul_splitted.shape[0] != n_splits:
        raise ArgumentError(
            f"mhc.reduce_partials_and_rmsnorm: n_splits is {n_splits}, expected {out_mul_splitted.shape[0]}, the splits of out_mul_splitted",
            kernel="mhc.reduce_partials_and_rmsnorm",
        )
    _normalise((out_mul_splitted, sqrsum_splitted), (), (rms_group_size, rms_eps), (out_mul, sqrsum, out))


def mhc_reduce_partials_and_rmsnorm_bwd(
    out_grad: torch.Tensor,
    out_mul: torch.Tensor,
    sqrsum: torch.Tensor,
    out_mul_grad: torch.Tensor,
    sqrsum_grad: torch.Tensor,
    rms_group_size: int,
    rms_eps: float,
) -> None:
    """Write the gradients of the products and of the sums of squares, from that of the mixes.

    Shapes: out_grad (n, 24), out_mul and out_mul_grad (n, g, 24), sqrsum and sqrsum_grad (n, g); n may be 0.
    Dtypes: float32.  Layout: contiguous.  Raises: ArgumentError, NoVariantError, LaunchError.
    """
    _normalise_bwd((out_grad, out_mul, sqrsum), (), (rms_group_size, rms_eps), (out_mul_grad, sqrsum_grad))

"""SwiGLU of expanded rows in the prefix layout, forward and backward, with and without a cast."""

from __future__ import annotations

import math
from typing import Any

import torch

from tkbuild.errors import ArgumentError
from tkbuild.ops.config import settings
from tkbuild.ops.quant.types import QuantTensor, check_packed, empty_scales, pair_of
from tkbuild.runtime.op import allocator, kernel_op, new_empty

_forward_cast = kernel_op("quant.swiglu_forward_and_per_token_cast")
_forward = kernel_op("quant.swiglu_forward")
_backward_cast = kernel_op("quant.swiglu_backward_and_per_token_cast")
_backward = kernel_op("quant.swiglu_backward")

_E4M3_F32 = ("e4m3", False)
_PLAIN_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
_STATIC_OF_PLAIN_DTYPE = {torch.bfloat16: ("bfloat16",), torch.float32: ("float32",)}
_BLOCKS = (32, 128)
_NUM_COUNTS = (4,)
_NO_LIMIT = -1.0


def swiglu_forward_and_per_token_cast(
    x: torch.Tensor,
    fmt: str,
    num_per_channels: int,
    psum_num_tokens_per_expert: torch.Tensor | None = None,
    topk_weights: torch.Tensor | None = None,
    routed_scaling_factor: float | None = None,
    use_tma_aligned_col_major_sf: bool = False,
    round_sf: bool = False,
    use_packed_ue8m0: bool = False,
    clamp_value: float | None = None,
    clamped_count: torch.Tensor | None = None,
) -> QuantTensor:
    """Quantise silu(gate) * up * weight of each row in blocks of ``num_per_channels`` columns; returns (data, sf).

    Columns [0, H) of x are the gates, limited to ``clamp_value`` from above, [H, 2 H) the ups, limited on both sides. Each
    operation rounds once to float32: ((gate / (1 + exp(-gate))) * up) * (topk_weights[n] * routed_scaling_factor). Scales and
    special values are those of ``per_token_cast``; a NaN passes the limits.

    psum_num_tokens_per_expert: expert e owns the rows from psum[e - 1], rounded up to the token alignment, to psum[e], which
    ascend. Only such rows are written; the others of data and sf are uninitialised. Without it every row is.
    clamped_count: gains the numbers of gates above, ups above and ups below the limit, and of the elements processed.

    Shapes: x (N, 2 H), H a multiple of 64, psum (E), topk_weights (N), clamped_count (4) -> data (N, H), sf (N, ceil(H / b)),
    packed (N, ceil(H / b / 4)); N may be 0.
    Dtypes: x bfloat16 or float32; psum int32; topk_weights float32; clamped_count int64; fmt 'e4m3'; sf float32 or int32.
    Layout: x any row stride that keeps 16-byte alignment, vectors contiguous; sf as in ``per_token_cast``. Blocks: 32, 128.
    Raises: ArgumentError, NoVariantError, LaunchError.
    """
    name = "quant.swiglu_forward_and_per_token_cast"
    _check_format(name, fmt, num_per_channels)
    size = size_of_half(name, x)
    _check_rows(name, x, psum_num_tokens_per_expert, topk_weights, routed_scaling_factor)
    check_counts(name, clamped_count, _NUM_COUNTS, clamp_value)
    rows = (None, topk_weights, None, psum_num_tokens_per_expert)
    flags = (use_tma_aligned_col_major_sf, round_sf, use_packed_ue8m0)
    scalars = (settings.token_alignment, _scaling(routed_scaling_factor), limit_of(name, clamp_value))
    return forward_cast(name, x, size, rows, num_per_channels, flags, clamped_count, scalars, settings.clamps[_E4M3_F32])


def swiglu_forward(
    x: torch.Tensor,
    fmt: str,
    psum_num_tokens_per_expert: torch.Tensor | None = None,
    topk_weights: torch.Tensor | None = None,
    routed_scaling_factor: float | None = None,
    clamp_value: float | None = None,
    clamped_count: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return silu(gate) * up * weight of each row in ``fmt``, 'bf16' or 'fp32'.

    All else as in ``swiglu_forward_and_per_token_cast``. Shapes: x (N, 2 H) -> (N, H).
    """
    name = "quant.swiglu_forward"
    dtype = _plain_dtype(name, fmt)
    size = size_of_half(name, x)
    _check_rows(name, x, psum_num_tokens_per_expert, topk_weights, routed_scaling_factor)
    check_counts(name, clamped_count, _NUM_COUNTS, clamp_value)
    out = new_empty(x, size, dtype)
    scalars = (settings.token_alignment, _scaling(routed_scaling_factor), limit_of(name, clamp_value))
    _forward((x, None, topk_weights, None, psum_num_tokens_per_expert, out, clamped_count), (), scalars)
    return out


def swiglu_backward_and_per_token_cast(
    x: QuantTensor,
    act_x_grad: torch.Tensor,
    fmt: str,
    num_per_channels: int,
    psum_num_tokens_per_expert: torch.Tensor | None = None,
    topk_weights: torch.Tensor | None = None,
    routed_scaling_factor: float | None = None,
    use_tma_aligned_col_major_sf: bool = False,
    round_sf: bool = False,
    use_packed_ue8m0: bool = False,
    clamp_value: float | None = None,
    do_recompute: bool = False,
) -> tuple[Any, ...]:
    """Return (x_grad, (x_grad quantised, its sf), weight_grad if weights were given, act if ``do_recompute``).

    x is the forward function's input as a pair (data, sf), quantised in the same blocks as the result; act_x_grad is the gradient
    of that function's result, act the result in bfloat16. The gradient is quantised from its float32 values, each half in blocks
    of its own; where a limit acts it is 0. weight_grad is the sum over a row of gradient times unweighted activation, in a fixed
    order, times routed_scaling_factor.

    psum_num_tokens_per_expert: rows from psum[e - 1] up to the token alignment, and those behind the last expert up to it, are
    padding: every result is 0 there. Rows further behind count as real.

    Shapes: x data (N, 2 H) or with a further leading dimension, H a multiple of 64 and of the block b, sf (N, 2 H / b);
    act_x_grad (N, H); psum (E); topk_weights (N) -> x_grad (N, 2 H), weight_grad (N), act (N, H); N may be 0.
    Dtypes: x data float8_e4m3fn, sf float32; act_x_grad bfloat16 or float32; topk_weights, weight_grad float32; psum int32; x_grad,
    act bfloat16; fmt 'e4m3'; sf of the result float32 or int32.
    Layout: inputs contiguous; sf of the result as in ``per_token_cast``. Blocks: 32, 128.
    Raises: ArgumentError, NoVariantError, LaunchError.
    """
    name = "quant.swiglu_backward_and_per_token_cast"
    _check_format(name, fmt, num_per_channels)
    check_packed(name, round_sf, use_packed_ue8m0)
    data, x_sf = pair_of(name, x)
    data = flat_rows(name, data)
    size = size_of_half(name, data)
    _check_rows(name, data, psum_num_tokens_per_expert, topk_weights, routed_scaling_factor)
    extras = _gradient_buffers(data, size, torch.bfloat16, topk_weights, do_recompute)
    tensors = (data, x_sf, flat_rows(name, act_x_grad), topk_weights, psum_num_tokens_per_expert, *extras)
    static = ("ue8m0" if use_packed_ue8m0 else "f32", use_tma_aligned_col_major_sf)
    limit = limit_of(name, clamp_value)
    weighting = (settings.token_alignment, _scaling(routed_scaling_factor))
    scalars = (num_per_channels, *weighting, limit, round_sf, settings.clamps[_E4M3_F32])
    x_grad, quantised, sf = _backward_cast(tensors, static, scalars)
    return x_grad, (quantised, sf), *_given(extras)


def swiglu_backward(
    x: torch.Tensor,
    act_x_grad: torch.Tensor,
    fmt: str,
    psum_num_tokens_per_expert: torch.Tensor | None = None,
    topk_weights: torch.Tensor | None = None,
    routed_scaling_factor: float | None = None,
    clamp_value: float | None = None,
    do_recompute: bool = False,
) -> tuple[torch.Tensor, ...]:
    """Return (x_grad, weight_grad if weights were given, act if ``do_recompute``), x_grad and act in ``fmt``, 'bf16' or 'fp32'.

    Dtypes: x and act_x_grad both bfloat16 or both float32. All else as in ``swiglu_backward_and_per_token_cast``.
    """
    name = "quant.swiglu_backward"
    dtype = _plain_dtype(name, fmt)
    rows = flat_rows(name, x)
    size = size_of_half(name, rows)
    _check_rows(name, rows, psum_num_tokens_per_expert, topk_weights, routed_scaling_factor)
    extras = _gradient_buffers(rows, size, dtype, topk_weights, do_recompute)
    tensors = (rows, flat_rows(name, act_x_grad), topk_weights, psum_num_tokens_per_expert, *extras)
    scalars = (settings.token_alignment, _scaling(routed_scaling_factor), limit_of(name, clamp_value))
    x_grad = _backward(tensors, _STATIC_OF_PLAIN_DTYPE[dtype], scalars)
    return x_grad, *_given(extras)


# ---- shared with the contract of 1.0


def refusal(name: str, found: str, expected: str) -> ArgumentError:
    """Return the error of a call of ``name`` outside its contract; texts are made on the way to it only, since they take time."""
    return ArgumentError(f"{name}: {found}, expected {expected}", kernel=name)


def size_of_half(name: str, x: torch.Tensor) -> tuple[int, int]:
    """Return (N, H) of x (N, 2 H). Raises: ArgumentError for another rank or an odd width."""
    shape = x.shape
    if len(shape) != 2 or shape[1] % 2 != 0:
        raise refusal(name, f"x has the shape {tuple(shape)}", "(N, 2 H)")
    return shape[0], shape[1] // 2


def limit_of(name: str, clamp_value: float | None) -> float:
    """Return the kernels' form of a limit, where a negative number stands for none. Raises: ArgumentError for one below 0."""
    if clamp_value is None:
        return _NO_LIMIT
    if not clamp_value >= 0:
        raise refusal(name, f"the clamp value is {clamp_value}", "a number from 0, or None")
    return float(clamp_value)


def check_counts(name: str, clamped_count: torch.Tensor | None, shape: tuple[int], clamp_value: float | None) -> None:
    """Raises: ArgumentError for counts without a limit or of another shape."""
    if clamped_count is None:
        return
    if clamp_value is None:
        raise refusal(name, "clamped_count without a clamp value", "both")
    if clamped_count.shape != shape:
        raise refusal(name, f"clamped_count has the shape {tuple(clamped_count.shape)}", f"{shape}")


def flat_rows(name: str, x: torch.Tensor) -> torch.Tensor:
    """Return x (.., C) of two or three dimensions as (N, C). Raises: ArgumentError for other ranks, or rows apart."""
    rank = x.dim()
    if rank == 2:
        return x
    if rank != 3:
        raise refusal(name, f"a tensor of {rank} dimensions", "2 or 3")
    if not x.is_contiguous():
        raise refusal(name, f"strides {x.stride()} of a tensor of shape {tuple(x.shape)}", "a contiguous one")
    return x.view(-1, x.shape[-1])


def forward_cast(
    name: str,
    x: torch.Tensor,
    size: tuple[int, int],
    rows: tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None, torch.Tensor | None],
    block: int,
    flags: tuple[bool, bool, bool],
    clamped_count: torch.Tensor | None,
    scalars: tuple[int, float, float],
    amax_min: float,
) -> QuantTensor:
    """Launch the quantising kernel; rows that it skips keep what the memory held.

    size: (N, H); rows: index, weights, experts, psum; block 0: whole rows; flags: column-major, round, packed; scalars: alignment,
    scaling, limit.
    """
    col_major, round_sf, packed = flags
    check_packed(name, round_sf, packed)
    num_rows, width = size
    empty = allocator(x)
    data = empty(size, torch.float8_e4m3fn)
    columns = -(-width // (block * (4 if packed else 1))) if block else 1
    sf = empty_scales(empty, num_rows, columns, torch.int32 if packed else torch.float32, col_major)
    _forward_cast((x, *rows, data, sf, clamped_count), (block,), (*scalars, round_sf, amax_min))
    return data, sf


# ---- of this contract


def _check_format(name: str, fmt: str, block: int) -> None:
    if fmt != "e4m3" or block not in _BLOCKS or not isinstance(block, int):
        raise refusal(name, f"fmt={fmt!r} in blocks of {block}", "'e4m3' of 32 or 128")


def _plain_dtype(name: str, fmt: str) -> torch.dtype:
    dtype = _PLAIN_DTYPES.get(fmt)
    if dtype is None:
        raise refusal(name, f"fmt is {fmt!r}", "'bf16' or 'fp32'")
    return dtype


def _scaling(routed_scaling_factor: float | None) -> float:
    return 1.0 if routed_scaling_factor is None else float(routed_scaling_factor)


def _check_rows(
    name: str,
    x: torch.Tensor,
    psum: torch.Tensor | None,
    topk_weights: torch.Tensor | None,
    routed_scaling_factor: float | None,
) -> None:
    if psum is not None and (psum.dim() != 1 or psum.numel() == 0):
        raise refusal(name, f"psum_num_tokens_per_expert has the shape {tuple(psum.shape)}", "(E,), E at least 1")
    if topk_weights is not None and topk_weights.shape != x.shape[:1]:
        raise refusal(name, f"topk_weights has the shape {tuple(topk_weights.shape)}", f"({x.shape[0]},), one for each row")
    if routed_scaling_factor is not None:
        if topk_weights is None:
            raise refusal(name, "routed_scaling_factor without topk_weights", "both")
        if math.isnan(routed_scaling_factor):
            raise refusal(name, "routed_scaling_factor is NaN", "a number")


def _gradient_buffers(
    x: torch.Tensor, size: tuple[int, int], dtype: torch.dtype, topk_weights: torch.Tensor | None, do_recompute: bool
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return (weight_grad, act), None for what is not wanted."""
    empty, weight_grad = allocator(x), None
    if topk_weights is not None:
        weight_grad = empty(size[:1], torch.float32)
        if not size[1]:  # nothing is launched for rows of no columns
            weight_grad.zero_()
    act = empty(size, dtype) if do_recompute else None
    return weight_grad, act


def _given(extras: tuple[torch.Tensor | None, torch.Tensor | None]) -> tuple[torch.Tensor, ...]:
    return tuple([extra for extra in extras if extra is not None])

"""SwiGLU of expanded rows in the mapping layout, contract of release 1.0."""

from __future__ import annotations

import torch

from tkbuild.ops.config import LARGEST_CLAMP, LEAST_CLAMPS, settings
from tkbuild.ops.quant.swiglu import check_counts, flat_rows, forward_cast, limit_of, refusal, size_of_half
from tkbuild.ops.quant.types import QuantTensor, pair_of
from tkbuild.runtime.op import kernel_op, new_empty

_channel_cast = kernel_op("quant.swiglu_forward_and_per_channel_cast_and_transpose")
_backward = kernel_op("quant.swiglu_backward_mapped")

_BLOCKS = (32, 128)
_NUM_COUNTS = (3,)
_WHOLE_ROWS = 0


def swiglu_forward_and_per_token_cast(
    x: torch.Tensor,
    fmt: str,
    num_per_channels: int,
    pos_to_token_topk: torch.Tensor | None = None,
    topk_weights: torch.Tensor | None = None,
    pos_to_expert: torch.Tensor | None = None,
    use_tma_aligned_col_major_sf: bool = False,
    round_sf: bool = False,
    use_packed_ue8m0: bool = False,
    swiglu_clamp_value: float | None = None,
    clamped_count: torch.Tensor | None = None,
    sf_clamp_min: float | None = None,
) -> QuantTensor:
    """Quantise silu(gate) * up * weight of each row in blocks of 128 columns, or as one block; returns (data, sf).

    Columns [0, H) of x are the gates, limited to ``swiglu_clamp_value`` from above, [H, 2 H) the ups, limited on both sides. Each
    operation rounds once to float32: ((gate / (1 + exp(-gate))) * up) * topk_weights.flatten()[pos_to_token_topk[n]]. Scales
    and special values are those of ``per_token_cast``, with ``sf_clamp_min`` for the clamp; a NaN passes the limits.

    pos_to_expert: rows with a negative one are not written; they are uninitialised in data and sf.
    pos_to_token_topk: a row that is written and names no slot has the weight 0.
    clamped_count: gains the numbers of gates above, ups above and ups below the limit in the rows that are written.

    Shapes: x (N, 2 H), H a multiple of 128, topk_weights (T, k), maps (N), clamped_count (3) -> data (N, H), sf (N, H / b), packed
    (N, ceil(H / b / 4)); N may be 0.
    Dtypes: x bfloat16 or float32; maps int32; topk_weights float32; clamped_count int64; fmt 'e4m3'; sf float32 or int32.
    Layout: x any row stride that keeps 16-byte alignment, others contiguous; sf as in ``per_token_cast``, row-major for whole rows.
    Raises: ArgumentError, NoVariantError, LaunchError.
    """
    name = "v1.quant.swiglu_forward_and_per_token_cast"
    size = size_of_half(name, x)
    width = size[1]
    col_major, whole_rows = use_tma_aligned_col_major_sf, num_per_channels != 128
    if fmt != "e4m3":
        raise refusal(name, f"fmt is {fmt!r}", "'e4m3'")
    if width % 128 != 0:
        raise refusal(name, f"{width} columns in each half", "a multiple of 128")
    if num_per_channels not in (128, width):
        raise refusal(name, f"num_per_channels is {num_per_channels}", f"128 or {width}, the whole row")
    if whole_rows and col_major:
        raise refusal(name, "column-major scales of whole rows", "row-major ones")
    if use_packed_ue8m0 and not col_major:
        raise refusal(name, "packed scales in rows", "use_tma_aligned_col_major_sf=True")
    check_counts(name, clamped_count, _NUM_COUNTS, swiglu_clamp_value)
    rows = (pos_to_token_topk, _flat_weights(name, pos_to_token_topk, topk_weights), pos_to_expert, None)
    flags = (col_major, round_sf, use_packed_ue8m0)
    block, scalars = _WHOLE_ROWS if whole_rows else 128, (1, 1.0, limit_of(name, swiglu_clamp_value))
    return forward_cast(name, x, size, rows, block, flags, clamped_count, scalars, _amax_min(name, sf_clamp_min))


def swiglu_forward_and_per_channel_cast_and_transpose(
    x: torch.Tensor,
    fmt: str,
    num_per_tokens: int,
    round_sf: bool = False,
    without_transpose: bool = False,
    swiglu_clamp_value: float | None = None,
) -> QuantTensor:
    """Quantise silu(gate) * up, rounded to bfloat16, with one scale for ``num_per_tokens`` rows of a column; returns (data, sf).

    Columns [0, H) of x are the gates, limited to ``swiglu_clamp_value`` from above, [H, 2 H) the ups, limited on both sides; the
    limit is rounded to bfloat16. Scales and special values are those of ``per_channel_cast``.

    Shapes: x (T, 2 H), T a multiple of 128, H of 64 -> data (H, T), (T, H) with ``without_transpose``; sf (T / b, H); T may be 0.
    Dtypes: x bfloat16; fmt 'e4m3'; data float8_e4m3fn; sf float32.
    Layout: x any row stride that keeps 16-byte alignment; results contiguous. Blocks: 32, 128.
    Raises: ArgumentError, NoVariantError, LaunchError.
    """
    name = "v1.quant.swiglu_forward_and_per_channel_cast_and_transpose"
    if fmt != "e4m3" or num_per_tokens not in _BLOCKS:
        raise refusal(name, f"fmt={fmt!r} in blocks of {num_per_tokens} rows", "'e4m3' of 32 or 128")
    scalars = (num_per_tokens, not without_transpose, limit_of(name, swiglu_clamp_value), round_sf, _amax_min(name, None))
    result: QuantTensor = _channel_cast((x,), (), scalars)
    return result


def swiglu_backward_and_per_token_cast(
    x: QuantTensor,
    grad_out: torch.Tensor,
    weight: torch.Tensor,
    pos_to_token_topk: torch.Tensor,
    token_topk_to_pos: torch.Tensor,
    num_per_channels: int,
    round_sf: bool = False,
    swiglu_clamp_value: float | None = None,
) -> tuple[torch.Tensor, QuantTensor, torch.Tensor, torch.Tensor]:
    """Return (act, (x_grad quantised, its sf), x_grad, weight_grad).

    x is the forward function's input as a pair (data, sf), quantised in the same blocks as the result; grad_out is the gradient
    of that function's result, act the result in bfloat16. The gradient is quantised from its float32 values, each half in blocks
    of its own; where a limit acts it is 0. A row that names no slot has the weight 0. weight_grad of a slot is the sum over its
    row of gradient times unweighted activation, in a fixed order; 0 where token_topk_to_pos is -1, and everywhere without rows.

    Shapes: x data (N, 2 H) or with a further leading dimension, H a multiple of the block b, sf (N, 2 H / b); grad_out (N, H);
    weight, token_topk_to_pos (T, k); pos_to_token_topk (N) -> act (N, H), x_grad (N, 2 H), weight_grad (T, k); N may be 0.
    Dtypes: x data float8_e4m3fn, all sf, weight, weight_grad float32; grad_out, act, x_grad bfloat16; maps int32.
    Layout: contiguous. Blocks: 32, 128.  Raises: ArgumentError, NoVariantError, LaunchError.
    """
    name = "v1.quant.swiglu_backward_and_per_token_cast"
    if num_per_channels not in _BLOCKS:
        raise refusal(name, f"num_per_channels is {num_per_channels}", "32 or 128")
    data, sf = pair_of(name, x)
    data = flat_rows(name, data)
    size_of_half(name, data)
    limit = limit_of(name, swiglu_clamp_value)
    weight_grad = new_empty(weight, weight.shape, torch.float32)
    if not data.numel():  # nothing is launched
        weight_grad.zero_()
    tensors = (data, sf, flat_rows(name, grad_out), weight, pos_to_token_topk, token_topk_to_pos, weight_grad)
    act, quantised, quantised_sf, x_grad = _backward(tensors, (), (num_per_channels, limit, round_sf, _amax_min(name, None)))
    return act, (quantised, quantised_sf), x_grad, weight_grad


def _flat_weights(name: str, pos_to_token_topk: torch.Tensor | None, topk_weights: torch.Tensor | None) -> torch.Tensor | None:
    if (pos_to_token_topk is None) != (topk_weights is None):
        raise refusal(name, "one of pos_to_token_topk and topk_weights", "both or none")
    if topk_weights is None:
        return None
    if topk_weights.dim() != 2 or not topk_weights.is_contiguous():
        raise refusal(name, f"topk_weights of shape {tuple(topk_weights.shape)}", "a contiguous (T, k)")
    return topk_weights.view(-1)


def _amax_min(name: str, sf_clamp_min: float | None) -> float:
    if sf_clamp_min is None:
        return settings.clamps["e4m3", False]
    if not LEAST_CLAMPS["e4m3"] <= sf_clamp_min <= LARGEST_CLAMP:
        raise refusal(name, f"sf_clamp_min is {sf_clamp_min}", f"a number from {LEAST_CLAMPS['e4m3']} to {LARGEST_CLAMP:.6g}")
    return float(sf_clamp_min)

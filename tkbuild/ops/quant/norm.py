"""RMSNorm of rows: forward, forward with a cast behind it, backward."""

from __future__ import annotations

from typing import TypeVar

import torch

from tkbuild.errors import ArgumentError
from tkbuild.ops.config import settings
from tkbuild.ops.quant.types import QuantTensor, check_packed, empty_scales
from tkbuild.runtime import get_num_sms
from tkbuild.runtime.op import allocator, dtype_name, is_traced, kernel_op, new_empty

_norm_forward = kernel_op("quant.norm_forward")
_norm_forward_and_per_token_cast = kernel_op("quant.norm_forward_and_per_token_cast")
_norm_backward = kernel_op("quant.norm_backward")
_E4M3_F32 = ("e4m3", False)
_CAST = ("e4m3", 32)
_WORD_COLUMNS = 128
_MEGA_MOE_TILE = 128
_Given = TypeVar("_Given", torch.Tensor, "torch.Tensor | None")
_GRAD_DTYPES = (torch.bfloat16, torch.float32)


def norm_forward(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    residual: torch.Tensor | None = None,
    out_scale: float = 1.0,
    out: torch.Tensor | None = None,
    residual_out: torch.Tensor | None = None,
    with_rstd: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """Normalise each row by its root mean square; returns (out, rstd or None, norm_input).

    norm_input is x, or x + ``residual`` rounded to the dtype (in ``residual_out`` if given). rstd = 1 / sqrt(mean of its
    squares + eps) in float32; out = (norm_input * rstd) * (weight * out_scale), rounded to the dtype once. The order of the
    sum depends on H and the dtype alone. A NaN element makes its whole row NaN; an infinite one makes it zeros, and NaN itself; other
    rows do not change. A row of zeros gives zeros, or NaN if eps is 0.

    Shapes: x, residual, out, residual_out (T, H) or (B, T, H), H a multiple of 16 up to 8192; weight (H); rstd (T) or
    (B, T). B and T may be 0.
    Dtypes: bfloat16 or float32, all but rstd the same.  Layout: rows contiguous, other strides multiples of 16 elements,
    weight contiguous. ``out`` may be x, and ``residual_out`` may be x or residual; other overlaps are not allowed.
    Raises: ArgumentError, NoVariantError.
    """
    _check_rank("quant.norm_forward", x)
    residual_out = _sum_buffer("quant.norm_forward", x, residual, residual_out)
    rstd = _rstd_buffer(x) if with_rstd else None
    traced = is_traced(x)
    if out is None and not traced:
        out = new_empty(x, x.shape, x.dtype)
    batched = _batched if traced else _as_is
    tensors = (batched(x), weight, batched(residual), batched(residual_out), rstd)
    result = _norm_forward(tensors, (), (eps, out_scale), None if out is None else (batched(out),))
    return (
        _like(x, result) if out is None else out,
        None if rstd is None else _rstd_of(x, rstd),
        x if residual_out is None else residual_out,
    )


def norm_forward_and_per_token_cast(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    fmt: str,
    num_per_channels: int,
    residual: torch.Tensor | None = None,
    out_scale: float = 1.0,
    use_tma_aligned_col_major_sf: bool = False,
    round_sf: bool = False,
    use_packed_ue8m0: bool = False,
    with_out_bf16: bool = False,
    out: QuantTensor | None = None,
    out_bf16: torch.Tensor | None = None,
    residual_out: torch.Tensor | None = None,
    mega_moe_sf: torch.Tensor | None = None,
    mega_moe_block_m: int = 0,
    with_rstd: bool = False,
) -> tuple[QuantTensor, torch.Tensor | None, torch.Tensor | None, torch.Tensor]:
    """Normalise each row and quantise it in blocks of 32 columns; returns ((data, sf), out_bf16 or None, rstd or None, norm_input).

    (data, sf) is, bit for bit, ``per_token_cast`` of what ``norm_forward`` returns; ``per_token_cast`` has the rules for scales,
    NaN, infinities and zeros. out_bf16 is the normalised rows in bfloat16. ``mega_moe_sf`` receives a second copy of the
    packed scales: the word of token t goes to row t // m * align(m, 128) + i // 128 * 128 + i % 32 * 4 + i % 128 // 32,
    with m = ``mega_moe_block_m`` and i = t % m; other rows are not touched.

    Shapes: as ``norm_forward``, H a multiple of 32 up to 8192; data like x; sf (.., T, H / 32), packed (.., T,
    ceil(H / 128)), bytes behind the last block 0; mega_moe_sf (T, H / 128), H a multiple of 128.
    Dtypes: x bfloat16 or float32; data float8_e4m3fn; sf float32, or int32 with ``use_packed_ue8m0``; mega_moe_sf int32.
    Layout: as ``norm_forward``; sf row-major, or with ``use_tma_aligned_col_major_sf`` strides (1, T rounded up to 4), batch
    behind batch; such an sf is always allocated here. mega_moe_sf strides (1, n), n at least ceil(T / m) * align(m, 128).
    Raises: ArgumentError, NoVariantError, LaunchError. fmt is 'e4m3' and num_per_channels 32.
    """
    kernel = "quant.norm_forward_and_per_token_cast"
    _check_rank(kernel, x)
    _check_cast(kernel, (fmt, num_per_channels), round_sf, use_packed_ue8m0)
    if out is not None and use_tma_aligned_col_major_sf:
        raise ArgumentError(
            f"{kernel}: out is given, expected None with use_tma_aligned_col_major_sf: such scales are allocated here"
        )
    if out_bf16 is not None and not with_out_bf16:
        raise ArgumentError(f"{kernel}: out_bf16 is given, expected with_out_bf16=True with it")
    residual_out = _sum_buffer(kernel, x, residual, residual_out)
    rstd = _rstd_buffer(x) if with_rstd else None
    if with_out_bf16 and out_bf16 is None:
        out_bf16 = new_empty(x, x.shape, torch.bfloat16)
    words = _mega_moe_rows(kernel, x, mega_moe_sf, mega_moe_block_m, round_sf)
    traced = is_traced(x)
    if out is None and not traced and x.dim() == 2:
        out = _cast_buffers(x, use_tma_aligned_col_major_sf, use_packed_ue8m0)
    batched = _batched if traced else _as_is
    data, sf = _norm_forward_and_per_token_cast(
        (batched(x), weight, batched(residual), batched(residual_out), batched(out_bf16), rstd, words),
        ("ue8m0" if use_packed_ue8m0 else "f32", use_tma_aligned_col_major_sf),
        (eps, out_scale, round_sf, settings.clamps[_E4M3_F32], mega_moe_block_m),
        None if out is None else (batched(out[0]), batched(out[1])),
    )
    cast = (_like(x, data), _like(x, sf)) if out is None else out
    return cast, out_bf16, None if rstd is None else _rstd_of(x, rstd), x if residual_out is None else residual_out


def norm_backward(
    out_grad: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    rstd: torch.Tensor,
    residual_out_grad: torch.Tensor | None = None,
    out_scale: float = 1.0,
    weight_grad: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the gradients of ``norm_forward`` with respect to its norm_input ``x`` and its weight: (x_grad, weight_grad or None).

    With xh = x * rstd, g = out_grad * out_scale, p = g * weight and c = mean(xh * p): x_grad = (p - xh * c) * rstd, plus
    ``residual_out_grad``. The weight's gradient, the sum of xh * g over the rows, is added to ``weight_grad`` if that is
    given, else returned in the weight's dtype. All in float32, rounded when stored; the order of the sums depends on the
    shape, the dtype and the number of SMs in use alone. NaN and infinities spread as the formulas say.

    Shapes: out_grad, x, residual_out_grad (T, H), H a multiple of 32 up to 8192; weight, weight_grad (H); rstd (T). T may
    be 0: then weight_grad is 0, or as given.
    Dtypes: bfloat16 or float32, all the same but rstd (float32) and weight_grad (either).
    Layout: rows contiguous, row strides multiples of 16 elements, the others contiguous; x_grad is contiguous.
    Raises: ArgumentError, NoVariantError.
    """
    kernel = "quant.norm_backward"
    if x.dim() != 2:
        raise ArgumentError(f"{kernel}: x has {x.dim()} dimensions, expected 2: (T, H)", kernel=kernel)
    if weight_grad is not None and weight is None:
        raise ArgumentError(f"{kernel}: weight_grad is given, expected a weight with it", kernel=kernel)
    accumulate = weight_grad is not None
    if weight is not None and weight_grad is None:
        weight_grad = new_empty(weight, weight.shape, weight.dtype) if x.shape[0] else torch.zeros_like(weight)
    grad_dtype = x.dtype if weight_grad is None else weight_grad.dtype
    if grad_dtype not in _GRAD_DTYPES:
        raise ArgumentError(f"{kernel}: {dtype_name(grad_dtype)}, expected bfloat16 or float32", kernel=kernel)
    count = get_num_sms(x.get_device()) if x.is_cuda else 1
    partial = new_empty(x, (count, 0 if weight is None else x.shape[1]), torch.float32)
    x_grad: torch.Tensor = _norm_backward(
        (out_grad, x, rstd, weight, residual_out_grad, weight_grad, partial),
        (dtype_name(grad_dtype),),
        (count, out_scale, accumulate),
    )
    return x_grad, weight_grad


def _check_rank(kernel: str, x: torch.Tensor) -> None:
    if x.dim() not in (2, 3):
        raise ArgumentError(f"{kernel}: x has {x.dim()} dimensions, expected (T, H) or (B, T, H)", kernel=kernel)


def _check_cast(kernel: str, cast: tuple[str, int], round_sf: bool, packed: bool) -> None:
    if cast != _CAST:
        raise ArgumentError(f"{kernel}: fmt and num_per_channels are {cast}, expected {_CAST}", kernel=kernel)
    check_packed(kernel, round_sf, packed)


def _sum_buffer(
    kernel: str, x: torch.Tensor, residual: torch.Tensor | None, residual_out: torch.Tensor | None
) -> torch.Tensor | None:
    """Where the sum of x and the residual goes; None without a residual."""
    if residual is None and residual_out is not None:
        raise ArgumentError(f"{kernel}: residual_out is given, expected a residual with it", kernel=kernel)
    if residual is None or residual_out is not None:
        return residual_out
    return new_empty(x, x.shape, x.dtype)


def _cast_buffers(x: torch.Tensor, col_major: bool, packed: bool) -> QuantTensor:
    """Room for the codes and scales of x (T, H)."""
    empty, size = allocator(x), x.shape
    columns = -(-size[1] // (_WORD_COLUMNS if packed else _CAST[1]))
    sf = empty_scales(empty, size[0], columns, torch.int32 if packed else torch.float32, col_major)
    return empty(size, torch.float8_e4m3fn), sf


def _rstd_buffer(x: torch.Tensor) -> torch.Tensor:
    return new_empty(x, (1, *x.shape[:-1])[-2:] if is_traced(x) else x.shape[:-1], torch.float32)


def _rstd_of(x: torch.Tensor, rstd: torch.Tensor) -> torch.Tensor:
    return rstd[0] if rstd.dim() == x.dim() else rstd


def _batched(tensor: _Given) -> _Given:
    """``tensor`` as a batch, for torch's tracing; the kernels take (B, T, H), and the launcher counts a batch that is missing as 1."""
    return tensor[None] if tensor is not None and tensor.dim() == 2 else tensor


def _as_is(tensor: _Given) -> _Given:
    return tensor


def _like(x: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
    """``result``, which has a batch dimension, without it where x has none."""
    return result[0] if x.dim() == 2 else result


def _mega_moe_rows(
    kernel: str, x: torch.Tensor, mega_moe_sf: torch.Tensor | None, block: int, round_sf: bool
) -> torch.Tensor | None:
    """All rows that a call writes some of: a view past the T rows of ``mega_moe_sf``. Raises: ArgumentError."""
    if mega_moe_sf is None:
        if block != 0:
            raise ArgumentError(f"{kernel}: mega_moe_block_m is {block}, expected 0 without mega_moe_sf", kernel=kernel)
        return None
    if block < 1 or x.dim() != 2 or not round_sf or x.shape[-1] % _WORD_COLUMNS:
        raise ArgumentError(
            f"{kernel}: mega_moe_sf is given, expected mega_moe_block_m >= 1, round_sf=True, and x (T, H) with H a multiple of "
            f"{_WORD_COLUMNS}; got {block}, {round_sf}, {tuple(x.shape)}",
            kernel=kernel,
        )
    tokens, columns = x.shape[0], x.shape[1] // _WORD_COLUMNS
    rows = -(-tokens // block) * (-(-block // _MEGA_MOE_TILE) * _MEGA_MOE_TILE)
    problem = f"{kernel}: mega_moe_sf has shape {tuple(mega_moe_sf.shape)} and strides {tuple(mega_moe_sf.stride())}, expected "
    if mega_moe_sf.shape != (tokens, columns) or (tokens > 1 and mega_moe_sf.stride(0) != 1) or mega_moe_sf.stride(1) < rows:
        raise ArgumentError(f"{problem}({tokens}, {columns}) and (1, at least {rows})", kernel=kernel)
    try:
        return mega_moe_sf.as_strided((rows, columns), (1, mega_moe_sf.stride(1)))
    except RuntimeError as exc:
        raise ArgumentError(f"{problem}storage for {rows} rows in each column", kernel=kernel) from exc

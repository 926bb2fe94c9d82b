"""The residual streams computed again through several layers."""

from __future__ import annotations

import array
import ctypes
from collections.abc import Callable, Sequence

import torch
from torch.compiler import is_compiling

from tkbuild.errors import ArgumentError
from tkbuild.ops.mhc.shapes import STREAMS, matrices, rows, streams, tokens
from tkbuild.runtime.op import kernel_op

__all__ = ["mhc_multilayer_recompute"]

_KERNEL = "mhc.multilayer_recompute"
_recompute = kernel_op(_KERNEL)
_ALIGNMENT = 16


def mhc_multilayer_recompute(
    initial_residual: torch.Tensor,
    pre_mix_list: list[torch.Tensor],
    layer_output_list: list[torch.Tensor],
    post_mix_list: list[torch.Tensor],
    comb_mix_list: list[torch.Tensor],
    layer_input_list: list[torch.Tensor],
    residual_list: list[torch.Tensor],
) -> None:
    """Write each layer's input and the residual behind it, from the first residual, all mixes and the layers' outputs.

    Layer l's input goes to layer_input_list[l], the residual behind it, rounded to bfloat16, to residual_list[l]. Bit for bit what
    ``mhc_pre_apply_mix_fwd`` and ``mhc_post_fwd`` write layer after layer.
    Shapes: initial_residual and residuals (..., m, H); pre and post mixes (..., m) or (..., m, 1), comb mixes (..., m, m); layer
    inputs and outputs (..., H); m = 4, H a multiple of 8; no tokens are allowed. L pre mixes and inputs; of the others L or L - 1 each.
    Dtypes: mixes float32, the others bfloat16.  Layout: contiguous, at multiples of 16 bytes; outputs that share no memory with others.
    The addresses of several layers' tensors are copied to the device without waiting for it; a CUDA graph may capture the call.
    Raises: ArgumentError, NoVariantError, LaunchError.
    """
    lists = (pre_mix_list, layer_output_list, post_mix_list, comb_mix_list, layer_input_list, residual_list)
    if is_compiling():
        _lists_op(initial_residual, *lists)
    else:
        _launch(initial_residual, *lists)


def _launch(
    initial_residual: torch.Tensor,
    pre_mix_list: Sequence[torch.Tensor],
    layer_output_list: Sequence[torch.Tensor],
    post_mix_list: Sequence[torch.Tensor],
    comb_mix_list: Sequence[torch.Tensor],
    layer_input_list: Sequence[torch.Tensor],
    residual_list: Sequence[torch.Tensor],
) -> None:
    layers, posts = len(pre_mix_list), len(layer_output_list)
    lists = (pre_mix_list, layer_output_list, post_mix_list, comb_mix_list, layer_input_list, residual_list)
    _check_lengths(lists, layers, posts)
    named = [(name, view, tensors) for (name, view), tensors in zip(_LISTS, lists, strict=True)]
    first = streams(_KERNEL, "initial_residual", initial_residual)
    firsts = [view(_KERNEL, name, tensors[0]) if tensors else None for name, view, tensors in named]
    device = initial_residual.get_device()
    addresses = [_addresses(*of_list, device) for of_list in named]
    table = _table(addresses, layers, initial_residual.device) if layers > 1 else None
    _recompute((first, *[None if t is None else t.unsqueeze(0) for t in firsts], table), (), (layers, posts))


def _mix(kernel: str, name: str, tensor: torch.Tensor) -> torch.Tensor:
    return tokens(kernel, name, tensor, (STREAMS, 1), (STREAMS,))


View = Callable[[str, str, torch.Tensor], torch.Tensor]
_LISTS: tuple[tuple[str, View], ...] = (
    ("pre_mix_list", _mix),
    ("layer_output_list", rows),
    ("post_mix_list", _mix),
    ("comb_mix_list", matrices),
    ("layer_input_list", rows),
    ("residual_list", streams),
)
#: Of the lists that have a tensor for each layer; the others may have one less.
_EVERY_LAYER = (0, 4)


#: What a traced call goes through: addresses are known only when it runs.
_lists_op = torch.library.custom_op(
    "tkbuild::mhc_multilayer_recompute_lists", _launch, mutates_args=("layer_input_list", "residual_list")
)
_lists_op.register_fake(lambda *_args: None)


def _check_lengths(lists: Sequence[Sequence[torch.Tensor]], layers: int, posts: int) -> None:
    right = all(len(tensors) == (layers if place in _EVERY_LAYER else posts) for place, tensors in enumerate(lists))
    if not right or layers < 1 or posts not in (layers, layers - 1):
        lengths = ", ".join(f"{name} {len(tensors)}" for (name, _), tensors in zip(_LISTS, lists, strict=True))
        raise ArgumentError(
            f"{_KERNEL}: the lists have lengths {lengths}; expected L >= 1 of pre_mix_list and layer_input_list, and all L or all "
            "L - 1 of the others",
            kernel=_KERNEL,
        )


def _addresses(name: str, view: View, tensors: Sequence[torch.Tensor], device: int) -> list[int]:
    """The addresses of a list's tensors. The kernel checks the first one; the others must be like it."""
    result = []
    for tensor in tensors:
        first, address = tensors[0], tensor.data_ptr()
        alike = (
            tensor.dtype == first.dtype and tensor.get_device() == device and tensor.is_contiguous() and address % _ALIGNMENT == 0
        )
        if not alike or (tensor.shape != first.shape and view(_KERNEL, name, tensor).shape != view(_KERNEL, name, first).shape):
            raise ArgumentError(
                f"{_KERNEL}: {name} has a tensor {tensor.dtype} {tuple(tensor.shape)} with strides {tensor.stride()} on {tensor.device} at "
                f"address {address:#x}, expected all {first.dtype} {tuple(first.shape)}, contiguous, on CUDA device {device} and "
                f"at multiples of {_ALIGNMENT} bytes",
                kernel=_KERNEL,
                argument=name,
            )
        result.append(address)
    return result


def _table(addresses: list[list[int]], layers: int, device: torch.device) -> torch.Tensor:
    """The addresses of each layer's tensors, 0 where it has none, on the device."""
    shape = (layers, len(addresses))
    by_layer = [of_list[layer] if layer < len(of_list) else 0 for layer in range(layers) for of_list in addresses]
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        # A graph would read host memory again at every replay; so the addresses become arguments of its kernels.
        table = torch.zeros(shape, dtype=torch.int64, device=device)
        torch._foreach_add_(list(table.flatten().unbind()), by_layer)
        return table
    on_host = torch.empty(shape, dtype=torch.int64, pin_memory=device.type == "cuda")
    ctypes.memmove(on_host.data_ptr(), array.array("q", by_layer).tobytes(), on_host.nbytes)
    return on_host.to(device, non_blocking=True)

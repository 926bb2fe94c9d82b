"""The residual streams computed again through several layers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.compiler import is_compiling

from tkbuild.errors import ArgumentError
from tkbuild.ops.mhc.shapes import STREAMS, rows, streams, tokens
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
    The addresses of all tensors are copied to the device without waiting for it; a CUDA graph may capture the call.
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
    named = {
        "pre_mix_list": [tokens(_KERNEL, "pre_mix_list", t, (STREAMS, 1), (STREAMS,)) for t in pre_mix_list],
        "layer_output_list": [rows(_KERNEL, "layer_output_list", t) for t in layer_output_list],
        "post_mix_list": [tokens(_KERNEL, "post_mix_list", t, (STREAMS, 1), (STREAMS,)) for t in post_mix_list],
        "comb_mix_list": [
            tokens(_KERNEL, "comb_mix_list", t, (STREAMS, STREAMS)).view(-1, STREAMS, STREAMS) for t in comb_mix_list
        ],
        "layer_input_list": [rows(_KERNEL, "layer_input_list", t) for t in layer_input_list],
        "residual_list": [streams(_KERNEL, "residual_list", t) for t in residual_list],
    }
    _check_lengths(named, layers, posts)
    for name, tensors in named.items():
        _check_alike(name, tensors, initial_residual.device)
    first = streams(_KERNEL, "initial_residual", initial_residual)
    table = _table(list(named.values()), layers, initial_residual.device)
    firsts = [tensors[0][None] if tensors else None for tensors in named.values()]
    _recompute((first, *firsts, table), (), (layers, posts))


#: What a traced call goes through: addresses are known only when it runs.
_lists_op = torch.library.custom_op(
    "tkbuild::mhc_multilayer_recompute_lists", _launch, mutates_args=("layer_input_list", "residual_list")
)
_lists_op.register_fake(lambda *_args: None)


def _check_lengths(lists: dict[str, list[torch.Tensor]], layers: int, posts: int) -> None:
    wanted = {name: layers if name in ("pre_mix_list", "layer_input_list") else posts for name in lists}
    if layers < 1 or posts not in (layers, layers - 1) or any(len(lists[name]) != count for name, count in wanted.items()):
        lengths = ", ".join(f"{name} {len(tensors)}" for name, tensors in lists.items())
        raise ArgumentError(
            f"{_KERNEL}: the lists have lengths {lengths}; expected L >= 1 of pre_mix_list and layer_input_list, and all L or all "
            "L - 1 of the others",
            kernel=_KERNEL,
        )


def _check_alike(name: str, tensors: list[torch.Tensor], device: torch.device) -> None:
    """The kernel checks the first tensor of a list; the others must be like it."""
    for tensor in tensors:
        like = tensor.shape == tensors[0].shape and tensor.dtype == tensors[0].dtype and tensor.device == device
        if not (like and tensor.is_contiguous() and tensor.data_ptr() % _ALIGNMENT == 0):
            raise ArgumentError(
                f"{_KERNEL}: {name} has a tensor {tensor.dtype} {tuple(tensor.shape)} with strides {tensor.stride()} on {tensor.device} at "
                f"address {tensor.data_ptr():#x}, expected all {tensors[0].dtype} {tuple(tensors[0].shape)}, contiguous, on {device} and "
                f"at multiples of {_ALIGNMENT} bytes",
                kernel=_KERNEL,
                argument=name,
            )


def _table(lists: list[list[torch.Tensor]], layers: int, device: torch.device) -> torch.Tensor:
    """The addresses of each layer's tensors, 0 where it has none, on the device."""
    addresses = [[tensors[layer].data_ptr() if layer < len(tensors) else 0 for tensors in lists] for layer in range(layers)]
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        # A graph would read host memory again at every replay; so the addresses become arguments of its kernels.
        table = torch.zeros((layers, len(lists)), dtype=torch.int64, device=device)
        torch._foreach_add_(list(table.flatten().unbind()), [address for row in addresses for address in row])
        return table
    on_host = torch.tensor(addresses, dtype=torch.int64, pin_memory=device.type == "cuda")
    return on_host.to(device, non_blocking=True)

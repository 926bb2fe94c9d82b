"""The gate, differentiable."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch

from tkbuild.errors import ArgumentError
from tkbuild.ops import engram
from tkbuild.ops.engram import gate

__all__ = ["engram_gate"]

Grad = torch.Tensor | None
#: Where gradients of the two weights are accumulated, or what tells it when the backward pass asks.
MainGrads = tuple[Grad, Grad] | Callable[[], tuple[Grad, Grad]]


class _Gate(torch.autograd.Function):
    """Saves its inputs and the statistics of the gate. ``kv`` is one tensor, or keys and values are two: then kv has the keys."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_states: torch.Tensor,
        kv: torch.Tensor,
        values: torch.Tensor | None,
        weight_hidden: torch.Tensor,
        weight_embed: torch.Tensor,
        settings: tuple[float, float],
        image_token_mask: torch.Tensor | None,
        main_grads: MainGrads,
    ) -> torch.Tensor:
        clamp_value, eps = settings
        k, v = gate.split_kv(kv) if values is None else (kv, values)
        weight = engram.fused_weight(weight_hidden, weight_embed)
        output, *saved = gate.forward(hidden_states, k, v, weight, eps, clamp_value, True, image_token_mask, False)
        ctx.save_for_backward(hidden_states, kv, values, weight_hidden, weight_embed, image_token_mask, weight, *saved)
        ctx.clamp_value, ctx.main_grads = clamp_value, main_grads
        return output

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[Grad, ...]:
        hidden_states, kv, values, weight_hidden, weight_embed, image_token_mask, weight, *statistics = ctx.saved_tensors
        needs, saved = ctx.needs_input_grad, tuple(statistics)
        grad, grad_v = grad_output.contiguous(), None
        if values is None:
            grad_x, grad_kv, partial = gate.backward_of_kv(
                grad, hidden_states, kv, weight, saved, ctx.clamp_value, image_token_mask
            )
        else:
            grad_x, grad_kv, grad_v, partial = gate.backward(
                grad, hidden_states, kv, values, weight, saved, ctx.clamp_value, image_token_mask, None
            )
        main_grads = ctx.main_grads() if callable(ctx.main_grads) else ctx.main_grads
        of_weights = _weight_grads(partial, (weight_hidden, weight_embed), (needs[3], needs[4]), main_grads)
        grads = [found if wanted else None for found, wanted in zip((grad_x, grad_kv, grad_v), needs, strict=False)]
        return *grads, *of_weights, None, None, None


def _weight_grads(
    partial: torch.Tensor, weights: tuple[torch.Tensor, torch.Tensor], needs: tuple[bool, bool], main_grads: tuple[Grad, Grad]
) -> tuple[Grad, Grad]:
    """Return the gradients of the weights that need one, or None where they are accumulated in ``main_grads``."""
    if not any(needs):
        return None, None
    targets = tuple(grad if wanted else None for grad, wanted in zip(main_grads, needs, strict=True))
    is_shared = targets[0] is not None and targets[0] is targets[1]
    buffers = [torch.zeros_like(partial[0]) if len(partial) else torch.zeros_like(weights[0], dtype=torch.float32) for _ in weights]
    used = [buffer if target is None or is_shared else target for target, buffer in zip(targets, buffers, strict=True)]
    engram.grad_w_reduce(partial, *weights, *used)
    if is_shared and targets[0] is not None:
        targets[0].add_(used[0]).add_(used[1])
    first, second = (
        buffer if wanted and target is None else None for buffer, wanted, target in zip(used, needs, targets, strict=True)
    )
    return first, second


def engram_gate(
    hidden_states: torch.Tensor,
    kv: torch.Tensor,
    weight_hidden: torch.Tensor,
    weight_embed: torch.Tensor,
    clamp_value: float,
    eps: float,
    image_token_mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return hidden_states with the gated value of each token added to its streams, as ``tkbuild.ops.engram.engram_gate_fwd``.

    The weight of the gate is weight_hidden * weight_embed. Differentiable once with respect to hidden_states, kv and both weights.
    Where a weight has a float32 attribute ``main_grad`` when the backward pass comes, its gradient is added there, and the weight's own stays
    as it is; a compiled call takes the attribute of its forward pass.

    Shapes: hidden_states (..., hc, H), hc = 4 for gradients; kv (..., (hc + 1) * H), the keys of all streams before the value;
    weights (hc, H); image_token_mask (...).  Dtypes: bfloat16; mask bool.
    Layout: any; what the kernels cannot read is copied, contiguous inputs are not.
    Raises: ArgumentError, NoVariantError, LaunchError.
    """
    return apply_gate(hidden_states, kv, None, (weight_hidden, weight_embed), (clamp_value, eps), image_token_mask)


def apply_gate(
    hidden_states: torch.Tensor,
    kv: torch.Tensor,
    values: torch.Tensor | None,
    weights: tuple[torch.Tensor, torch.Tensor],
    settings: tuple[float, float],
    image_token_mask: torch.Tensor | None,
) -> torch.Tensor:
    """The layer of both releases: ``kv`` with keys and values, or with the keys and ``values`` apart. settings: clamp_value and eps."""
    tokens, streams, width = _check_shapes(hidden_states, kv, values, image_token_mask)
    x = hidden_states.reshape(tokens, streams, width).contiguous()
    keys = _readable(kv.reshape(tokens, streams + 1 if values is None else streams, width))
    given = (x, keys, None if values is None else _readable(values.reshape(tokens, width)))
    mask = None if image_token_mask is None else image_token_mask.reshape(-1).contiguous()
    factors = [weight.contiguous() for weight in weights]
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (*given, *weights)):
        main_grads = functools.partial(_main_grads, weights)
        given_grads = main_grads() if torch.compiler.is_compiling() else main_grads
        result: torch.Tensor = _Gate.apply(*given, *factors, settings, mask, given_grads)  # type: ignore[no-untyped-call]
    else:
        k, v = gate.split_kv(keys) if given[2] is None else (keys, given[2])
        result = gate.forward(x, k, v, engram.fused_weight(*factors), settings[1], settings[0], False, mask, False)[0]
    return result.view(hidden_states.shape)


def _main_grads(weights: tuple[torch.Tensor, torch.Tensor]) -> tuple[Grad, Grad]:
    return getattr(weights[0], "main_grad", None), getattr(weights[1], "main_grad", None)


def _check_shapes(
    hidden_states: torch.Tensor, kv: torch.Tensor, values: torch.Tensor | None, mask: torch.Tensor | None
) -> tuple[int, int, int]:
    """Return tokens, streams and columns. Raises: ArgumentError for shapes that contradict each other."""
    shape = hidden_states.shape
    if len(shape) < 3:
        raise ArgumentError(f"engram_gate: hidden_states has shape {tuple(shape)}, expected (..., hc, H)", argument="hidden_states")
    lead, streams, width = shape[:-2], shape[-2], shape[-1]
    pair = {"k": (kv, shape), "v": (values, (*lead, width))}
    wanted = {"kv": (kv, (*lead, (streams + 1) * width))} if values is None else pair
    for name, (tensor, expected) in {**wanted, "image_token_mask": (mask, lead)}.items():
        if tensor is not None and tensor.shape != expected:
            raise ArgumentError(
                f"engram_gate: {name} has shape {tuple(tensor.shape)}, expected {tuple(expected)} beside hidden_states {tuple(shape)}",
                argument=name,
            )
    return math.prod(lead), streams, width


def _readable(rows: torch.Tensor) -> torch.Tensor:
    """``rows``, or a copy where the kernels, which read 8 elements at a time, cannot."""
    *strides, last = rows.stride()
    offset = 0 if torch.compiler.is_compiling() else rows.storage_offset()  # tracing does not know it
    if last == 1 and not any(n % 8 for n in (*strides, offset)):
        return rows
    return rows.clone(memory_format=torch.contiguous_format)

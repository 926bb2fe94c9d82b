"""Reference of the residual streams computed again through several layers."""

from __future__ import annotations

import torch

from tkbuild.reference.arithmetic import fma

_CHUNK_TOKENS = 1 << 13


def mixed(mix: torch.Tensor, streams: torch.Tensor) -> torch.Tensor:
    """Return the sum of the streams times their mix, added in increasing order by fused multiply-adds, in the streams' dtype.

    Shapes: mix (n, m), streams (n, m, H) -> (n, H).
    """
    total = mix[:, 0, None] * _wide(streams[:, 0])
    for i in range(1, streams.shape[1]):
        total = _fma(mix[:, i, None], _wide(streams[:, i]), total)
    return total.to(streams.dtype)


def updated(output: torch.Tensor, streams: torch.Tensor, post: torch.Tensor, comb: torch.Tensor) -> torch.Tensor:
    """Return the streams behind a layer: post[o] * output + sum of comb[i, o] * streams[i], added in increasing i onto the first product.

    Shapes: output (n, H), streams (n, m, H), post (n, m), comb (n, m, m) -> (n, m, H), in the streams' dtype.
    """
    results = []
    for o in range(streams.shape[1]):
        total = post[:, o, None] * _wide(output)
        for i in range(streams.shape[1]):
            total = _fma(comb[:, i, o, None], _wide(streams[:, i]), total)
        results.append(total.to(streams.dtype))
    return torch.stack(results, dim=1)


def multilayer_recompute(
    initial_residual: torch.Tensor,
    pre_mix: torch.Tensor,
    layer_output: torch.Tensor | None,
    post_mix: torch.Tensor | None,
    comb_mix: torch.Tensor | None,
    layer_input: torch.Tensor,
    residual: torch.Tensor | None,
    _addresses: torch.Tensor | None = None,
    *,
    num_layers: int,
    num_posts: int,
) -> tuple[torch.Tensor, ...]:
    """Return (layer_input, residual): for each layer ``mixed`` of the streams, then the streams ``updated`` with its output.

    The streams are rounded to their dtype behind each layer. The last layer has no output where num_posts is num_layers - 1; without any
    output there is no residual to return.
    Shapes: initial_residual (n, m, H); pre_mix (L, n, m), layer_output (P, n, H), post_mix (P, n, m), comb_mix (P, n, m, m),
    layer_input (L, n, H), residual (P, n, m, H) with L = num_layers, P = num_posts.
    Dtypes: mixes float32, the others bfloat16.
    """
    inputs, residuals = torch.empty_like(layer_input), None if residual is None else torch.empty_like(residual)
    for first in range(0, initial_residual.shape[0], _CHUNK_TOKENS):
        chunk = slice(first, first + _CHUNK_TOKENS)
        streams = initial_residual[chunk]
        for layer in range(num_layers):
            inputs[layer, chunk] = mixed(pre_mix[layer, chunk], streams)
            if layer < num_posts:
                assert layer_output is not None and post_mix is not None and comb_mix is not None and residuals is not None
                streams = updated(layer_output[layer, chunk], streams, post_mix[layer, chunk], comb_mix[layer, chunk])
                residuals[layer, chunk] = streams
    return (inputs,) if residuals is None else (inputs, residuals)


def _wide(x: torch.Tensor) -> torch.Tensor:
    return x if x.dtype == torch.float64 else x.float()


def _fma(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    return a * b + c if c.dtype == torch.float64 else fma(a, b, c)

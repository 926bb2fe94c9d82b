"""How a kernel's call is spelled through the public functions, ours or those of a package that has the same names."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

import torch

from tkbuild.cases import Call

Thunk = Callable[[], Any]
Tensors = list[Any]
"""The inputs of a call in the spec's order; None for an optional one that is left out."""
PeerCall = Callable[[Any, Tensors, Mapping[str, Any]], Thunk]


def peer_thunk(kernel: str, api: ModuleType, call: Call) -> Thunk | None:
    """Return the call of ``kernel`` through the names of ``api``, which is `tkbuild.ops` or a package it stands in for.

    None where ``api`` has no such function, or one that does not take the call's values.
    """
    make = _TORCH_CALLS.get(kernel) if api.__name__ == "torch" else _PUBLIC_CALLS.get(kernel)
    if make is None:
        return None
    try:
        thunk = make(api, list(call.input_views), call.values)
    except AttributeError:
        return None
    return thunk


def _per_token_cast(api: Any, tensors: Tensors, values: Mapping[str, Any]) -> Thunk:
    packed = values["sf_format"] == "ue8m0"
    return functools.partial(
        api.quant.per_token_cast,
        tensors[0],
        "e4m3",
        values["block"],
        use_tma_aligned_col_major_sf=bool(values["col_major"]),
        round_sf=packed or bool(values["round_sf"]),
        use_packed_ue8m0=packed,
    )


def _cast_back(api: Any, tensors: Tensors, values: Mapping[str, Any]) -> Thunk:
    fmt = {"bfloat16": "bf16", "float32": "fp32"}[values["out_dtype"]]
    return functools.partial(api.quant.cast_back, (tensors[0], tensors[1]), fmt, (values["bm"], values["bk"]))


def _sinkhorn(api: Any, tensors: Tensors, values: Mapping[str, Any]) -> Thunk:
    out = torch.empty_like(tensors[0])
    return functools.partial(api.mhc.mhc_sinkhorn_fwd, tensors[0], out, values["repeat"], values["eps"])


def _sinkhorn_bwd(api: Any, tensors: Tensors, values: Mapping[str, Any]) -> Thunk:
    out = torch.empty_like(tensors[0])
    return functools.partial(api.mhc.mhc_sinkhorn_bwd, tensors[0], tensors[1], out, values["repeat"], values["eps"])


_PUBLIC_CALLS: dict[str, PeerCall] = {
    "transpose.transpose": lambda api, t, v: functools.partial(api.transpose.transpose, t[0]),
    "transpose.batched_transpose": lambda api, t, v: functools.partial(api.transpose.batched_transpose, t[0]),
    "quant.per_token_cast": _per_token_cast,
    "quant.cast_back": _cast_back,
    "moe.topk_gate": lambda api, t, v: functools.partial(api.moe.topk_gate, t[0], v["num_topk"]),
    "engram.fused_weight": lambda api, t, v: functools.partial(api.engram.fused_weight, t[0], t[1]),
    "engram.grad_w_reduce": lambda api, t, v: functools.partial(api.engram.grad_w_reduce, *t),
    "mhc.sinkhorn": _sinkhorn,
    "mhc.sinkhorn_bwd": _sinkhorn_bwd,
}
_TORCH_CALLS: dict[str, PeerCall] = {
    "examples.gemm_bf16": lambda api, t, v: functools.partial(api.mm, t[0], t[1].T),
    "transpose.transpose": lambda api, t, v: lambda: t[0].T.contiguous(),
    "transpose.batched_transpose": lambda api, t, v: lambda: t[0].transpose(1, 2).contiguous(),
}

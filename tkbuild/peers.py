"""How a kernel's call is spelled through the public functions, ours or those of a package that has the same names."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

import torch

from tkbuild.cases import Call

Thunk = Callable[[], Any]
Tensors = list[Any]
"""The inputs of a call in the spec's order; None for an optional one that is left out."""
PeerCall = Callable[[Any, Tensors, Mapping[str, Any]], "Thunk | None"]
_E4M3_MAX = 448.0
_SHORT = {"bfloat16": "bf16", "float32": "fp32"}


def peer_thunk(kernel: str, api: ModuleType, call: Call) -> Thunk | None:
    """Return the call of ``kernel`` through the names of ``api``: `tkbuild.ops`, `tkbuild.ops.v1` or a package they stand in for.

    None where ``api`` has no such function, or one that does not take the call's values.
    """
    calls = _TORCH_CALLS if api.__name__ == "torch" else FIRST_RELEASE_CALLS if _is_first_release(api) else PUBLIC_CALLS
    make = calls.get(kernel)
    if make is None:
        return None
    try:
        thunk = make(api, list(call.input_views), call.values)
    except AttributeError:
        return None
    return thunk if thunk is not None and _fits(thunk) else None


def _fits(thunk: Thunk) -> bool:
    """Whether the function takes the arguments by number and name; a release may lack some."""
    if not isinstance(thunk, functools.partial):
        return True
    try:
        inspect.signature(thunk.func).bind(*thunk.args, **thunk.keywords)
    except TypeError:
        return False
    return True


def _is_first_release(api: ModuleType) -> bool:
    """Whether ``api`` has the functions of TileKernels 1.0; release 2.1 has no transposes."""
    return api.__name__ == "tkbuild.ops.v1" or (api.__name__ == "tile_kernels" and hasattr(api, "transpose"))


def _pair(tensors: Tensors) -> tuple[Any, Any]:
    """Data and the one of the arguments for its scales that is given."""
    data, *scales = tensors
    (given,) = [sf for sf in scales if sf is not None]
    return data, given


def _scale_flags(values: Mapping[str, Any], col_major: bool) -> dict[str, bool]:
    """How all functions that make float32 or packed scales are told their kind and layout."""
    packed = values["sf_format"] == "ue8m0"
    return {
        "use_tma_aligned_col_major_sf": col_major,
        "round_sf": packed or bool(values["round_sf"]),
        "use_packed_ue8m0": packed,
    }


def _token_flags(values: Mapping[str, Any]) -> dict[str, bool]:
    given = _scale_flags(values, bool(values["col_major"]))
    return {**given, "round_sf": False, "use_e4m3_sf": True} if values["sf_format"] == "e4m3" else given


def _per_token_cast(api: Any, tensors: Tensors, values: Mapping[str, Any]) -> Thunk:
    return functools.partial(api.quant.per_token_cast, tensors[0], values["fmt"], values["block"], **_token_flags(values))


def _per_token_cast_stochastic(api: Any, tensors: Tensors, values: Mapping[str, Any]) -> Thunk:
    flags = {**_token_flags(values), "stochastic_cast": True}
    return functools.partial(api.quant.per_token_cast, tensors[0], values["fmt"], values["block"], **flags)


def _per_token_recast(api: Any, tensors: Tensors, values: Mapping[str, Any]) -> Thunk:
    block, cast = (values["xm"], values["xk"]), api.quant.per_token_cast
    return functools.partial(cast, _pair(tensors), values["fmt"], values["block"], block, **_token_flags(values))


def _per_token_cast_with_sf_only(api: Any, tensors: Tensors, values: Mapping[str, Any]) -> Thunk:
    cast, fmt = api.quant.per_token_cast_with_sf_only, "e4m3" if values["largest"] == _E4M3_MAX else "e2m1"
    return functools.partial(cast, tensors[0], fmt, values["block"], **_token_flags(values))


def _per_token_cast_with_precomputed_sf(api: Any, tensors: Tensors, values: Mapping[str, Any]) -> Thunk:
    cast, flags = api.quant.per_token_cast_with_precomputed_sf, {"use_e4m3_sf": True} if tensors[1] is None else {}
    x, sf = _pair(tensors)
    return functools.partial(cast, x, values["fmt"], values["block"], sf, **flags)


def _per_token_cast_and_cast_back(api: Any, tensors: Tensors, values: Mapping[str, Any]) -> Thunk:
    flags = bool(values["round_sf"]), bool(values["e4m3_sf"])
    return functools.partial(api.quant.per_token_cast_and_cast_back, tensors[0], values["fmt"], values["block"], *flags)


def _cast_back(api: Any, tensors: Tensors, values: Mapping[str, Any]) -> Thunk:
    special = "e5m6" if values["data_format"] == "e5m6" else None
    return functools.partial(
        api.quant.cast_back, _pair(tensors), _SHORT[values["out_dtype"]], (values["bm"], values["bk"]), special
    )


def _cast(api: Any, tensors: Tensors, values: Mapping[str, Any]) -> Thunk:
    return functools.partial(api.quant.cast, tensors[0], getattr(torch, values["out_dtype"]))


def _cast_stochastic(api: Any, tensors: Tensors, values: Mapping[str, Any]) -> Thunk:
    return functools.partial(api.quant.cast, tensors[0], getattr(torch, values["out_dtype"]), stochastic_rounding=True)


def _block_flags(values: Mapping[str, Any]) -> dict[str, bool]:
    return _scale_flags(values, bool(values["col_major"]))


def _per_block_cast(api: Any, tensors: Tensors, values: Mapping[str, Any]) -> Thunk:
    block = (values["bm"], values["bk"])
    return functools.partial(api.quant.per_block_cast, tensors[0], values["fmt"], block, **_block_flags(values))


def _per_block_cast_with_sf_only(api: Any, tensors: Tensors, values: Mapping[str, Any]) -> Thunk:
    block = (values["bm"], values["bk"])
    fmt = "e4m3" if values["largest"] == _E4M3_MAX else "e2m1"
    return functools.partial(api.quant.per_block_cast_with_sf_only, tensors[0], fmt, block, **_block_flags(values))


def _per_block_cast_with_precomputed_sf(api: Any, tensors: Tensors, values: Mapping[str, Any]) -> Thunk:
    block = (values["bm"], values["bk"])
    return functools.partial(api.quant.per_block_cast_with_precomputed_sf, tensors[0], values["fmt"], block, tensors[1])


def _per_block_cast_lossless(api: Any, tensors: Tensors, values: Mapping[str, Any]) -> Thunk:
    old, new = (values["xm"], values["xk"]), (values["bm"], values["bk"])
    flags = _block_flags({**values, "round_sf": True})
    return functools.partial(api.quant.per_block_cast_lossless, _pair(tensors), "e4m3", old, new, **flags)


def _channels(api: Any, x: Any, pos_to_token: Any, values: Mapping[str, Any], num_per_channels: int | None) -> Thunk | None:
    packed = values["sf_format"] == "ue8m0"
    if packed and pos_to_token is not None:
        return None  # no public function has both
    given = {"round_sf": packed or bool(values["round_sf"])}
    given |= {} if num_per_channels is None else {"num_per_channels": num_per_channels}
    if pos_to_token is not None:
        cast = api.quant.per_channel_cast_fused
        return functools.partial(cast, x, "e4m3", values["block"], pos_to_token=pos_to_token, **given)
    given |= {"use_packed_ue8m0": True} if packed else {}
    return functools.partial(api.quant.per_channel_cast, x, "e4m3", values["block"], **given)


def _per_channel_cast(api: Any, tensors: Tensors, values: Mapping[str, Any]) -> Thunk | None:
    return _channels(api, tensors[0], tensors[1], values, None)


def _per_channel_cast_quantised(api: Any, tensors: Tensors, values: Mapping[str, Any]) -> Thunk | None:
    return _channels(api, (tensors[0], tensors[1]), tensors[2], values, values["x_block"])


def _per_channel_cast_and_transpose(api: Any, tensors: Tensors, values: Mapping[str, Any]) -> Thunk:
    cast = api.quant.per_channel_cast_and_transpose
    return functools.partial(cast, tensors[0], "e4m3", values["block"], bool(values["round_sf"]))


def _gate_flags(tensors: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a gate that all gates take by name, and those before the rank."""
    return {
        **{name: tensor for name, tensor in tensors.items() if tensor is not None},
        "num_topk": values["num_topk"],
        "use_shared_as_routed": values["num_shared"] > 0,
        "num_shared_experts": values["num_shared"],
        "routed_scaling_factor": values["routed_scaling_factor"],
        "ep_rank": values["ep_rank"],
    }


def _moe_topk_gate_forward(api: Any, tensors: Tensors, values: Mapping[str, Any]) -> Thunk:
    names = ("logits", "mask", "bias", "image_bias", "image_token_mask", "fix_routing_mask", "to_physical_map", "logical_count")
    given = dict(zip((*names, "force_random", "unmapped_topk_idx", "scores"), tensors, strict=True))
    return functools.partial(api.moe.moe_topk_gate_forward, **_gate_flags(given, values))


def _moe_topk_gate_backward(api: Any, tensors: Tensors, values: Mapping[str, Any]) -> Thunk:
    *first, mask, grad_scores_sum = tensors
    backward = functools.partial(api.moe.moe_topk_gate_backward, *first, values["routed_scaling_factor"])
    return backward if grad_scores_sum is None else functools.partial(backward, mask=mask, grad_scores_sum=grad_scores_sum)


def _top2_sum_gate(api: Any, tensors: Tensors, values: Mapping[str, Any]) -> Thunk:
    names = ("logits", "bias", "mask", "fix_routing_mask", "to_physical_map", "logical_count", "unmapped_topk_idx")
    given = _gate_flags(dict(zip(names, tensors, strict=True)), values)
    given |= {name: values[name] for name in ("num_topk_groups", "num_groups", "num_ep_ranks", "tp_rank", "num_tp_ranks")}
    given["scoring_func"] = ("sigmoid", "sqrtsoftplus", "softmax")[values["scoring"]]
    return functools.partial(api.moe.top2_sum_gate, **given)


def _topk_sum_and_topk_group_idx(api: Any, tensors: Tensors, values: Mapping[str, Any]) -> Thunk:
    return functools.partial(api.moe.topk_sum_and_topk_group_idx, tensors[0], values["num_topk_sum"], values["num_topk_groups"])


def _normalize_weight(api: Any, tensors: Tensors, values: Mapping[str, Any]) -> Thunk | None:
    return None if values["in_order"] else functools.partial(api.moe.normalize_weight, tensors[0])


def _sinkhorn(api: Any, tensors: Tensors, values: Mapping[str, Any]) -> Thunk:
    out = torch.empty_like(tensors[0])
    return functools.partial(api.mhc.mhc_sinkhorn_fwd, tensors[0], out, values["repeat"], values["eps"])


def _sinkhorn_bwd(api: Any, tensors: Tensors, values: Mapping[str, Any]) -> Thunk:
    out = torch.empty_like(tensors[0])
    return functools.partial(api.mhc.mhc_sinkhorn_bwd, tensors[0], tensors[1], out, values["repeat"], values["eps"])


def _pre_norm_fn_mul(api: Any, tensors: Tensors, values: Mapping[str, Any]) -> Thunk:
    x, fn = tensors
    leading = (values["num_splits"], x.shape[0], values["num_groups"])
    outs = fn.new_empty((*leading, fn.shape[0])), fn.new_empty(leading)
    return functools.partial(api.mhc.mhc_pre_norm_fn_mul_fwd, x, fn, *outs)


def _pre_norm_fn_mul_bwd(api: Any, tensors: Tensors, values: Mapping[str, Any]) -> Thunk:
    return functools.partial(api.mhc.mhc_pre_norm_fn_mul_bwd, *tensors[:6], bool(values["accumulate"]))


def _reduce_partials_and_rmsnorm(api: Any, tensors: Tensors, values: Mapping[str, Any]) -> Thunk:
    products, squares = tensors
    outs = products.new_empty(products.shape[1:]), squares.new_empty(squares.shape[1:]), products.new_empty(products.shape[1::2])
    group = values["rms_group_size"], values["rms_eps"], products.shape[0]
    return functools.partial(api.mhc.mhc_reduce_partials_and_rmsnorm_fwd, products, squares, *outs, *group)


def _reduce_partials_and_rmsnorm_bwd(api: Any, tensors: Tensors, values: Mapping[str, Any]) -> Thunk:
    outs = torch.empty_like(tensors[1]), torch.empty_like(tensors[2])
    group = values["rms_group_size"], values["rms_eps"]
    return functools.partial(api.mhc.mhc_reduce_partials_and_rmsnorm_bwd, *tensors, *outs, *group)


def _pre_big_fuse(api: Any, tensors: Tensors, values: Mapping[str, Any]) -> Thunk:
    residual = tensors[4]
    n, m, columns = residual.shape
    outs = tensors[0].new_empty((n, m)), tensors[0].new_empty((n, m * m)), residual.new_empty((n, columns))
    names = ("rms_eps", "mhc_pre_eps", "mhc_sinkhorn_eps", "mhc_post_mult_value", "sinkhorn_repeat")
    function = api.mhc.mhc_pre_big_fuse_fwd
    return functools.partial(function, *tensors, *outs, *(values[name] for name in names), tensors[0].shape[0])


def _multilayer_recompute(api: Any, tensors: Tensors, values: Mapping[str, Any]) -> Thunk:
    lists = [[] if stacked is None else list(stacked.unbind()) for stacked in tensors[1:7]]
    return functools.partial(api.mhc.mhc_multilayer_recompute, tensors[0], *lists)


def _expand_to_mhc(api: Any, tensors: Tensors, values: Mapping[str, Any]) -> Thunk:
    (x,) = tensors
    return functools.partial(api.mhc.expand_to_mhc_fwd, x, x.new_empty(x.shape[0], values["m"], x.shape[1]))


def _expand_to_mhc_bwd(api: Any, tensors: Tensors, values: Mapping[str, Any]) -> Thunk:
    (grad,) = tensors
    return functools.partial(api.mhc.expand_to_mhc_bwd, grad, grad.new_empty(grad.shape[0], grad.shape[2]))


def _head_compute_mix(api: Any, tensors: Tensors, values: Mapping[str, Any]) -> Thunk:
    out = torch.empty_like(tensors[0])
    return functools.partial(api.mhc.mhc_head_compute_mix_fwd, *tensors, out, values["mhc_pre_eps"])


def _head_compute_mix_bwd(api: Any, tensors: Tensors, values: Mapping[str, Any]) -> Thunk:
    *given, scale_sums, base_sums = tensors
    grad = torch.empty_like(tensors[1])
    return functools.partial(api.mhc.mhc_head_compute_mix_bwd, *given, grad, scale_sums, base_sums, values["P"])


def _pre_split_mixes(api: Any, tensors: Tensors, values: Mapping[str, Any]) -> Thunk:
    outs = [tensors[0].new_empty(tensors[0].shape[0], columns) for columns in (4, 4, 16)]
    scalars = values["mhc_post_mult_value"], values["mhc_pre_eps"]
    return functools.partial(api.mhc.mhc_pre_split_mixes_fwd, *tensors, *outs, *scalars)


def _pre_split_mixes_bwd(api: Any, tensors: Tensors, values: Mapping[str, Any]) -> Thunk:
    given = tensors[:7]
    outs = [torch.empty_like(given[place]) for place in (3, 5, 6)]
    return functools.partial(api.mhc.mhc_pre_split_mixes_bwd, *given, *outs, values["mhc_post_mult_value"])


def _fn_normw_merge(api: Any, tensors: Tensors, values: Mapping[str, Any]) -> Thunk:
    return functools.partial(api.mhc.mhc_fn_normw_merge_fwd, *tensors, torch.empty_like(tensors[0]))


def _one_sequence(tensors: Tensors) -> Tensors:
    """x, residual, post, comb and more as a batch of one, which those of release 2.1 have."""
    x, residual, post, *more = tensors
    return [x[None], residual[None], post[None, :, :, None], *(t[None] for t in more)]


def _pre_apply_mix(api: Any, tensors: Tensors, values: Mapping[str, Any]) -> Thunk:
    x, mix = tensors
    return functools.partial(api.mhc.mhc_pre_apply_mix_fwd, x, mix, x.new_empty(x.shape[0], x.shape[2]))


def _pre_apply_mix_bwd(api: Any, tensors: Tensors, values: Mapping[str, Any]) -> Thunk | None:
    if not values["accumulate"]:
        return None  # the public function always does
    return functools.partial(api.mhc.mhc_pre_apply_mix_bwd, *tensors)


def _clamp(values: Mapping[str, Any]) -> float | None:
    return None if values["clamp_value"] < 0 else float(values["clamp_value"])


def _swiglu_flags(values: Mapping[str, Any], weights: Any) -> dict[str, Any]:
    """What all SwiGLU functions of release 2.1 take; it has the prefix layout only, and no scales of whole rows."""
    if values.get("block") == 0:
        raise AttributeError("no public function of release 2.1 has one scale for a whole row")
    return {
        "topk_weights": weights,
        "routed_scaling_factor": None if weights is None else values["routed_scaling_factor"],
        "clamp_value": _clamp(values),
    }


def _swiglu_forward_cast(api: Any, tensors: Tensors, values: Mapping[str, Any]) -> Thunk | None:
    x, slots, weights, _, psum, _, sf, counts = tensors
    if slots is not None:
        return None
    flags = {**_swiglu_flags(values, weights), **_scale_flags(values, sf.stride(0) < sf.stride(1)), "clamped_count": counts}
    return functools.partial(api.quant.swiglu_forward_and_per_token_cast, x, "e4m3", values["block"], psum, **flags)


def _swiglu_forward(api: Any, tensors: Tensors, values: Mapping[str, Any]) -> Thunk:
    x, _, weights, _, psum, _, counts = tensors
    flags = {**_swiglu_flags(values, weights), "clamped_count": counts}
    return functools.partial(api.quant.swiglu_forward, x, _SHORT[values["out_dtype"]], psum, **flags)


def _swiglu_channels(api: Any, tensors: Tensors, values: Mapping[str, Any]) -> Thunk:
    flags = {
        "round_sf": bool(values["round_sf"]),
        "without_transpose": not values["transposed"],
        "swiglu_clamp_value": _clamp(values),
    }
    function = api.quant.swiglu_forward_and_per_channel_cast_and_transpose
    return functools.partial(function, tensors[0], "e4m3", values["block"], **flags)


def _swiglu_backward_cast(api: Any, tensors: Tensors, values: Mapping[str, Any]) -> Thunk:
    x, x_sf, grad, weights, psum, _, act = tensors
    flags = {**_swiglu_flags(values, weights), **_block_flags(values), "do_recompute": act is not None}
    return functools.partial(api.quant.swiglu_backward_and_per_token_cast, (x, x_sf), grad, "e4m3", values["block"], psum, **flags)


def _swiglu_backward(api: Any, tensors: Tensors, values: Mapping[str, Any]) -> Thunk:
    x, grad, weights, psum, _, act = tensors
    flags = {**_swiglu_flags(values, weights), "do_recompute": act is not None}
    return functools.partial(api.quant.swiglu_backward, x, grad, _SHORT[values["out_dtype"]], psum, **flags)


def _unbatched(tensors: Tensors) -> Tensors:
    """A batch of one as what it holds: the public functions also take (T, H)."""
    return [t[0] if t is not None and t.dim() > 1 and t.shape[0] == 1 else t for t in tensors]


def _norm_forward(api: Any, tensors: Tensors, values: Mapping[str, Any]) -> Thunk:
    x, weight, residual, residual_out, rstd = _unbatched(tensors)
    flags = {"out_scale": values["out_scale"], "residual_out": residual_out, "with_rstd": rstd is not None}
    return functools.partial(api.quant.norm_forward, x, weight, values["eps"], residual, **flags)


def _norm_forward_cast(api: Any, tensors: Tensors, values: Mapping[str, Any]) -> Thunk:
    x, weight, residual, residual_out, out_bf16, rstd = _unbatched(tensors[:6])
    flags = {**_block_flags(values), "out_scale": values["out_scale"], "residual_out": residual_out, "out_bf16": out_bf16}
    flags |= {"with_out_bf16": out_bf16 is not None, "with_rstd": rstd is not None}
    function = api.quant.norm_forward_and_per_token_cast
    return functools.partial(function, x, weight, values["eps"], "e4m3", 32, residual, **flags)


def _norm_backward(api: Any, tensors: Tensors, values: Mapping[str, Any]) -> Thunk:
    out_grad, x, rstd, weight, residual_out_grad, weight_grad, _ = tensors
    weight_grad = weight_grad if values["accumulate"] else None
    function, scale = api.quant.norm_backward, values["out_scale"]
    return functools.partial(function, out_grad, x, weight, rstd, residual_out_grad, scale, weight_grad)


def _get_fused_mapping(api: Any, tensors: Tensors, values: Mapping[str, Any]) -> Thunk:
    sizes = values["num_experts"], values["N"], values["alignment"]
    return functools.partial(api.moe.get_fused_mapping, tensors[0], *sizes, force_no_sync=True)


def _expand_to_fused(api: Any, tensors: Tensors, values: Mapping[str, Any]) -> Thunk:
    x, token_topk_to_pos, pos_to_expert, sf, *_ = tensors
    if sf is None:
        return functools.partial(api.moe.expand_to_fused, x, token_topk_to_pos, pos_to_expert)
    packed = values["sf_row"] == 1
    scaled, block = (x, sf if packed else sf.view(torch.float32)), 32 if packed else 128
    return functools.partial(api.moe.expand_to_fused_with_sf, scaled, block, token_topk_to_pos, pos_to_expert, packed)


def _reduce_fused(api: Any, tensors: Tensors, values: Mapping[str, Any]) -> Thunk:
    x, x_sf, weights, token_topk_to_pos, sf = tensors
    fmt = "e4m3" if values["out_dtype"] == "float8_e4m3fn" else ""
    return functools.partial(api.moe.reduce_fused, x if x_sf is None else (x, x_sf), weights, token_topk_to_pos, fmt, sf)


def _mask_indices_by_tp(api: Any, tensors: Tensors, values: Mapping[str, Any]) -> Thunk:
    ranks = values["experts_per_rank"], 1, values["tp_rank"], values["num_tp_ranks"]
    return functools.partial(api.moe.mask_indices_by_tp, tensors[0], *ranks)


def _with_values(k: Any, v: Any) -> Any:
    """Keys and values as the one tensor that release 2.1 takes."""
    return torch.cat((k, v[:, None]), dim=1)


def _engram_gate_fwd(api: Any, tensors: Tensors, values: Mapping[str, Any]) -> Thunk:
    x, k, v, weight, mask, dot, *_ = tensors
    flags = {"save_for_backward": dot is not None, "image_token_mask": mask}
    given = x, _with_values(k, v), weight, values["eps"], values["clamp_value"]
    return functools.partial(api.engram.engram_gate_fwd, *given, **flags)


def _engram_gate_bwd(api: Any, tensors: Tensors, values: Mapping[str, Any]) -> Thunk:
    grad_out, x, k, v, weight, *saved, mask = tensors
    given = grad_out, x, _with_values(k, v), weight, *saved, values["clamp_value"]
    return functools.partial(api.engram.engram_gate_bwd, *given, image_token_mask=mask)


def _engram_momentum_update(api: Any, tensors: Tensors, values: Mapping[str, Any]) -> Thunk:
    return functools.partial(api.engram.engram_sinkhorn_momentum_update, *tensors, values["beta"], bool(values["nesterov"]))


def _engram_step_reduce(api: Any, tensors: Tensors, values: Mapping[str, Any]) -> Thunk:
    return functools.partial(api.engram.engram_sinkhorn_step_reduce, tensors[0], tensors[0].new_empty(tensors[0].shape[1:]))


def _engram_finalize(api: Any, tensors: Tensors, values: Mapping[str, Any]) -> Thunk:
    return functools.partial(api.engram.engram_sinkhorn_finalize, *tensors, values["eps"], values["alpha"])


def _apply_rotary(api: Any, tensors: Tensors, values: Mapping[str, Any]) -> Thunk:
    x, cache, positions = tensors
    flags = {"interleaved": bool(values["interleaved"]), "conjugate": bool(values["conjugate"])}
    given = {"positions": positions, "seqlen_offset": values["seqlen_offset"], **flags}
    return functools.partial(api.transform.apply_rotary, x, cache, **given)


PUBLIC_CALLS: dict[str, PeerCall] = {
    "transpose.transpose": lambda api, t, v: functools.partial(api.transpose.transpose, t[0]),
    "transpose.batched_transpose": lambda api, t, v: functools.partial(api.transpose.batched_transpose, t[0]),
    "quant.per_token_cast": _per_token_cast,
    "quant.per_token_cast_and_cast_back": _per_token_cast_and_cast_back,
    "quant.per_token_cast_stochastic": _per_token_cast_stochastic,
    "quant.per_token_cast_with_precomputed_sf": _per_token_cast_with_precomputed_sf,
    "quant.per_token_cast_with_sf_only": _per_token_cast_with_sf_only,
    "quant.per_token_recast": _per_token_recast,
    "quant.cast": _cast,
    "quant.cast_back": _cast_back,
    "quant.cast_stochastic": _cast_stochastic,
    "quant.per_block_cast": _per_block_cast,
    "quant.per_block_cast_with_sf_only": _per_block_cast_with_sf_only,
    "quant.per_block_cast_with_precomputed_sf": _per_block_cast_with_precomputed_sf,
    "quant.per_block_cast_lossless": _per_block_cast_lossless,
    "quant.per_channel_cast": _per_channel_cast,
    "quant.per_channel_cast_quantised": _per_channel_cast_quantised,
    "quant.per_channel_cast_and_transpose": _per_channel_cast_and_transpose,
    "quant.swiglu_forward_and_per_token_cast": _swiglu_forward_cast,
    "quant.swiglu_forward": _swiglu_forward,
    "quant.swiglu_forward_and_per_channel_cast_and_transpose": _swiglu_channels,
    "quant.swiglu_backward_and_per_token_cast": _swiglu_backward_cast,
    "quant.swiglu_backward": _swiglu_backward,
    "quant.norm_forward": _norm_forward,
    "quant.norm_forward_and_per_token_cast": _norm_forward_cast,
    "quant.norm_backward": _norm_backward,
    "moe.moe_topk_gate_backward": _moe_topk_gate_backward,
    "moe.moe_topk_gate_forward": _moe_topk_gate_forward,
    "moe.normalize_weight": _normalize_weight,
    "moe.top2_sum_gate": _top2_sum_gate,
    "moe.topk_sum_and_topk_group_idx": _topk_sum_and_topk_group_idx,
    "moe.topk_gate": lambda api, t, v: functools.partial(api.moe.topk_gate, t[0], v["num_topk"]),
    "moe.aux_fi": lambda api, t, v: functools.partial(api.moe.aux_fi, t[0], v["num_experts"], v["num_aux_topk"]),
    "moe.expand_to_fused": _expand_to_fused,
    "moe.get_fused_mapping": _get_fused_mapping,
    "moe.group_count": lambda api, t, v: functools.partial(api.moe.group_count, t[0], v["num_groups"]),
    "moe.inplace_unique_group_indices": lambda api, t, v: functools.partial(api.moe.inplace_unique_group_indices, t[0], 128),
    "moe.mask_indices_by_tp": _mask_indices_by_tp,
    "moe.reduce_fused": _reduce_fused,
    "engram.fused_weight": lambda api, t, v: functools.partial(api.engram.fused_weight, t[0], t[1]),
    "engram.gate_bwd": _engram_gate_bwd,
    "engram.gate_fwd": _engram_gate_fwd,
    "engram.grad_w_reduce": lambda api, t, v: functools.partial(api.engram.grad_w_reduce, *t),
    "engram.ngram_hash": lambda api, t, v: functools.partial(api.engram.engram_hash, *t),
    "engram.sinkhorn_finalize": _engram_finalize,
    "engram.sinkhorn_momentum_update": _engram_momentum_update,
    "engram.sinkhorn_step": lambda api, t, v: functools.partial(api.engram.engram_sinkhorn_step, *t, v["eps"]),
    "engram.sinkhorn_step_reduce": _engram_step_reduce,
    "transform.apply_rotary": _apply_rotary,
    "mhc.multilayer_recompute": _multilayer_recompute,
    "mhc.pre_big_fuse": _pre_big_fuse,
    "mhc.pre_norm_fn_mul": _pre_norm_fn_mul,
    "mhc.pre_norm_fn_mul_bwd": _pre_norm_fn_mul_bwd,
    "mhc.reduce_partials_and_rmsnorm": _reduce_partials_and_rmsnorm,
    "mhc.reduce_partials_and_rmsnorm_bwd": _reduce_partials_and_rmsnorm_bwd,
    "mhc.expand_to_mhc": _expand_to_mhc,
    "mhc.expand_to_mhc_bwd": _expand_to_mhc_bwd,
    "mhc.fn_normw_merge": _fn_normw_merge,
    "mhc.fn_normw_merge_bwd": lambda api, t, v: functools.partial(api.mhc.mhc_fn_normw_merge_bwd, *t),
    "mhc.head_compute_mix": _head_compute_mix,
    "mhc.head_compute_mix_bwd": _head_compute_mix_bwd,
    "mhc.post": lambda api, t, v: functools.partial(api.mhc.mhc_post_fwd, *_one_sequence(t)),
    "mhc.post_bwd": lambda api, t, v: functools.partial(api.mhc.mhc_post_bwd, *_one_sequence(t)),
    "mhc.pre_apply_mix": _pre_apply_mix,
    "mhc.pre_apply_mix_bwd": _pre_apply_mix_bwd,
    "mhc.pre_split_mixes": _pre_split_mixes,
    "mhc.pre_split_mixes_bwd": _pre_split_mixes_bwd,
    "mhc.sinkhorn": _sinkhorn,
    "mhc.sinkhorn_bwd": _sinkhorn_bwd,
}
# ---- what release 1.0 spells differently


def _normalize_weight_in_order(api: Any, tensors: Tensors, values: Mapping[str, Any]) -> Thunk | None:
    return functools.partial(api.moe.normalize_weight, tensors[0]) if values["in_order"] else None


def _per_row_cast(api: Any, tensors: Tensors, values: Mapping[str, Any]) -> Thunk | None:
    if values["fmt"] == "e5m6":
        return None  # no public function
    flags = _scale_flags(values, bool(values["col_major"]))
    return functools.partial(api.quant.per_token_cast, tensors[0], values["fmt"], tensors[0].shape[1], **flags)


def _swiglu_forward_cast_mapped(api: Any, tensors: Tensors, values: Mapping[str, Any]) -> Thunk | None:
    x, slots, weights, experts, psum, _, sf, counts = tensors
    if psum is not None:
        return None
    flags = {**_scale_flags(values, sf.stride(0) < sf.stride(1)), "swiglu_clamp_value": _clamp(values), "clamped_count": counts}
    block = values["block"] or x.shape[1] // 2
    return functools.partial(api.quant.swiglu_forward_and_per_token_cast, x, "e4m3", block, slots, weights, experts, **flags)


def _swiglu_backward_mapped(api: Any, tensors: Tensors, values: Mapping[str, Any]) -> Thunk:
    x, x_sf, grad_out, weight, *maps = tensors[:6]
    backward, settings = api.quant.swiglu_backward_and_per_token_cast, (values["block"], bool(values["round_sf"]), _clamp(values))
    return functools.partial(backward, (x, x_sf), grad_out, weight, *maps, *settings)


def _per_channel_cast_quantised_fused(api: Any, tensors: Tensors, values: Mapping[str, Any]) -> Thunk | None:
    if values["sf_format"] == "ue8m0":
        return None
    settings = values["block"], bool(values["round_sf"]), values["x_block"], tensors[2]
    return functools.partial(api.quant.per_channel_cast_fused, (tensors[0], tensors[1]), "e4m3", *settings)


def _engram_hash_of_text(api: Any, tensors: Tensors, values: Mapping[str, Any]) -> Thunk | None:
    *given, mask = tensors
    return functools.partial(api.engram.engram_hash, *given) if mask is None else None


def _engram_gate_fwd_apart(api: Any, tensors: Tensors, values: Mapping[str, Any]) -> Thunk | None:
    x, k, v, weight, mask, dot, *_ = tensors
    given = x, k, v, weight, values["eps"], values["clamp_value"], dot is not None
    return functools.partial(api.engram.engram_gate_fwd, *given) if mask is None else None


def _engram_gate_bwd_apart(api: Any, tensors: Tensors, values: Mapping[str, Any]) -> Thunk | None:
    *given, mask = tensors
    return functools.partial(api.engram.engram_gate_bwd, *given, values["clamp_value"]) if mask is None else None


FIRST_RELEASE_CALLS: dict[str, PeerCall] = {
    **PUBLIC_CALLS,
    "moe.normalize_weight": _normalize_weight_in_order,
    "quant.per_row_cast": _per_row_cast,
    "quant.swiglu_forward_and_per_token_cast": _swiglu_forward_cast_mapped,
    "quant.swiglu_backward_mapped": _swiglu_backward_mapped,
    "quant.per_channel_cast_quantised": _per_channel_cast_quantised_fused,
    "engram.ngram_hash": _engram_hash_of_text,
    "engram.gate_fwd": _engram_gate_fwd_apart,
    "engram.gate_bwd": _engram_gate_bwd_apart,
}

_TORCH_CALLS: dict[str, PeerCall] = {
    "examples.gemm_bf16": lambda api, t, v: functools.partial(api.mm, t[0], t[1].T),
    "quant.cast": lambda api, t, v: functools.partial(t[0].to, getattr(torch, v["out_dtype"])),
    "transpose.transpose": lambda api, t, v: lambda: t[0].T.contiguous(),
    "transpose.batched_transpose": lambda api, t, v: lambda: t[0].transpose(1, 2).contiguous(),
}

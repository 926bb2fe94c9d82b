"""Quantisation, contract of release 1.0: as ``tkbuild.ops.quant``, where arguments that 2.1 added are optional."""

from tkbuild.ops.quant import (
    QuantTensor,
    cast_back,
    per_block_cast,
    per_block_cast_lossless,
    per_block_cast_with_precomputed_sf,
    per_block_cast_with_sf_only,
    per_channel_cast,
    per_token_cast_back,
    unpack_from_e2m1fn_x2,
)
from tkbuild.ops.v1.quant.per_channel import per_channel_cast_and_transpose, per_channel_cast_fused
from tkbuild.ops.v1.quant.per_token import per_token_cast, per_token_cast_with_precomputed_sf, per_token_cast_with_sf_only
from tkbuild.ops.v1.quant.swiglu import (
    swiglu_backward_and_per_token_cast,
    swiglu_forward_and_per_channel_cast_and_transpose,
    swiglu_forward_and_per_token_cast,
)

__all__ = [
    "QuantTensor",
    "cast_back",
    "per_block_cast",
    "per_block_cast_lossless",
    "per_block_cast_with_precomputed_sf",
    "per_block_cast_with_sf_only",
    "per_channel_cast",
    "per_channel_cast_and_transpose",
    "per_channel_cast_fused",
    "per_token_cast",
    "per_token_cast_back",
    "per_token_cast_with_precomputed_sf",
    "per_token_cast_with_sf_only",
    "swiglu_backward_and_per_token_cast",
    "swiglu_forward_and_per_channel_cast_and_transpose",
    "swiglu_forward_and_per_token_cast",
    "unpack_from_e2m1fn_x2",
]

"""Quantisation, contract of release 2.1. ``tkbuild.ops.v1.quant`` has the contract of 1.0.

``sf`` is always the dequantisation factor: value ~ data * sf.
"""

from tkbuild.ops.quant.back import cast_back, per_token_cast_back, unpack_from_e2m1fn_x2
from tkbuild.ops.quant.cast import cast
from tkbuild.ops.quant.norm import norm_backward, norm_forward, norm_forward_and_per_token_cast
from tkbuild.ops.quant.per_block import (
    per_block_cast,
    per_block_cast_lossless,
    per_block_cast_with_precomputed_sf,
    per_block_cast_with_sf_only,
)
from tkbuild.ops.quant.per_channel import per_channel_cast
from tkbuild.ops.quant.per_token import (
    per_token_cast,
    per_token_cast_and_cast_back,
    per_token_cast_with_precomputed_sf,
    per_token_cast_with_sf_only,
)
from tkbuild.ops.quant.swiglu import (
    swiglu_backward,
    swiglu_backward_and_per_token_cast,
    swiglu_forward,
    swiglu_forward_and_per_token_cast,
)
from tkbuild.ops.quant.types import QuantTensor
from tkbuild.ops.quant.weight_sf import batched_transpose_weight_sf

__all__ = [
    "QuantTensor",
    "batched_transpose_weight_sf",
    "cast",
    "cast_back",
    "norm_backward",
    "norm_forward",
    "norm_forward_and_per_token_cast",
    "per_block_cast",
    "per_block_cast_lossless",
    "per_block_cast_with_precomputed_sf",
    "per_block_cast_with_sf_only",
    "per_channel_cast",
    "per_token_cast",
    "per_token_cast_and_cast_back",
    "per_token_cast_back",
    "per_token_cast_with_precomputed_sf",
    "per_token_cast_with_sf_only",
    "swiglu_backward",
    "swiglu_backward_and_per_token_cast",
    "swiglu_forward",
    "swiglu_forward_and_per_token_cast",
    "unpack_from_e2m1fn_x2",
]

"""References of the quantisation kernels, and the rules they share: scales, rounding, layouts of scale factors."""

from tkbuild.reference.quant.back import cast_back
from tkbuild.reference.quant.cast import cast, cast_stochastic
from tkbuild.reference.quant.norm import norm_backward, norm_forward, norm_forward_and_per_token_cast
from tkbuild.reference.quant.per_block import (
    per_block_cast,
    per_block_cast_lossless,
    per_block_cast_with_precomputed_sf,
    per_block_cast_with_sf_only,
)
from tkbuild.reference.quant.per_channel import per_channel_cast, per_channel_cast_and_transpose, per_channel_cast_quantised
from tkbuild.reference.quant.per_row import per_row_cast
from tkbuild.reference.quant.per_token import (
    per_token_cast,
    per_token_cast_and_cast_back,
    per_token_cast_stochastic,
    per_token_cast_with_precomputed_sf,
    per_token_cast_with_sf_only,
    per_token_recast,
)
from tkbuild.reference.quant.swiglu import (
    swiglu_backward,
    swiglu_backward_and_per_token_cast,
    swiglu_backward_mapped,
    swiglu_forward,
    swiglu_forward_and_per_channel_cast_and_transpose,
    swiglu_forward_and_per_token_cast,
)
from tkbuild.reference.quant.weight_sf import batched_transpose_weight_sf, weight_sf

__all__ = [
    "batched_transpose_weight_sf",
    "cast",
    "cast_back",
    "cast_stochastic",
    "norm_backward",
    "norm_forward",
    "norm_forward_and_per_token_cast",
    "per_block_cast",
    "per_block_cast_lossless",
    "per_block_cast_with_precomputed_sf",
    "per_block_cast_with_sf_only",
    "per_channel_cast",
    "per_channel_cast_and_transpose",
    "per_channel_cast_quantised",
    "per_row_cast",
    "per_token_cast",
    "per_token_cast_and_cast_back",
    "per_token_cast_stochastic",
    "per_token_cast_with_precomputed_sf",
    "per_token_cast_with_sf_only",
    "per_token_recast",
    "swiglu_backward",
    "swiglu_backward_and_per_token_cast",
    "swiglu_backward_mapped",
    "swiglu_forward",
    "swiglu_forward_and_per_channel_cast_and_transpose",
    "swiglu_forward_and_per_token_cast",
    "weight_sf",
]

"""Quantisation, contract of release 1.0: as ``tkbuild.ops.quant`` without the arguments that 2.1 added."""

from tkbuild.ops.quant import QuantTensor, cast_back, per_token_cast_back
from tkbuild.ops.v1.quant.per_token import per_token_cast

__all__ = ["QuantTensor", "cast_back", "per_token_cast", "per_token_cast_back"]

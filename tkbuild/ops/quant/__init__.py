"""Quantisation, contract of release 2.1. ``tkbuild.ops.v1.quant`` has the contract of 1.0.

``sf`` is always the dequantisation factor: value ~ data * sf.
"""

from tkbuild.ops.quant.back import cast_back, per_token_cast_back
from tkbuild.ops.quant.per_token import per_token_cast
from tkbuild.ops.quant.types import QuantTensor

__all__ = ["QuantTensor", "cast_back", "per_token_cast", "per_token_cast_back"]

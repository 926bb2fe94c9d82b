"""References of the quantisation kernels, and the rules they share: scales, rounding, layouts of scale factors."""

from tkbuild.reference.quant.back import cast_back
from tkbuild.reference.quant.per_token import per_token_cast

__all__ = ["cast_back", "per_token_cast"]

"""References of the engram kernels."""

from tkbuild.reference.engram.weights import fused_weight, grad_w_reduce

__all__ = ["fused_weight", "grad_w_reduce"]

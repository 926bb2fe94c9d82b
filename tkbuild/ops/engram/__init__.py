"""Engram: n-gram memory with a gate."""

from tkbuild.ops.engram.weights import fused_weight, grad_w_reduce

__all__ = ["fused_weight", "grad_w_reduce"]

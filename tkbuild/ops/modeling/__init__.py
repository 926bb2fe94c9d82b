"""Layers with gradients, built on the kernels."""

from tkbuild.ops.modeling import engram, mhc, moe

__all__ = ["engram", "mhc", "moe"]

"""Layers with gradients, built on the kernels."""

from tkbuild.ops.modeling import mhc, moe

__all__ = ["mhc", "moe"]

"""Layers with gradients, built on the kernels."""

from tkbuild.ops.modeling import mhc

__all__ = ["mhc"]

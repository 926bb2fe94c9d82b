"""Differentiable manifold hyper-connection operators."""

from tkbuild.ops.modeling.mhc.sinkhorn import register_autograd, sinkhorn_normalize

__all__ = ["register_autograd", "sinkhorn_normalize"]

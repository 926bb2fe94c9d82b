"""References of the manifold hyper-connection kernels."""

from tkbuild.reference.mhc.sinkhorn import sinkhorn, sinkhorn_bwd

__all__ = ["sinkhorn", "sinkhorn_bwd"]

"""Manifold hyper-connections: the kernels under their 2.1 names, which write into outputs that the caller gives."""

from tkbuild.ops.mhc.sinkhorn import mhc_sinkhorn_bwd, mhc_sinkhorn_fwd

__all__ = ["mhc_sinkhorn_bwd", "mhc_sinkhorn_fwd"]

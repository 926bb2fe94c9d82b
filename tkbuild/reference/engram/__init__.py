"""References of the engram kernels."""

from tkbuild.reference.engram.gate import gate_bwd, gate_fwd
from tkbuild.reference.engram.ngram_hash import ngram_hash
from tkbuild.reference.engram.sinkhorn import sinkhorn_finalize, sinkhorn_momentum_update, sinkhorn_step, sinkhorn_step_reduce
from tkbuild.reference.engram.weights import fused_weight, grad_w_reduce

__all__ = [
    "fused_weight",
    "gate_bwd",
    "gate_fwd",
    "grad_w_reduce",
    "ngram_hash",
    "sinkhorn_finalize",
    "sinkhorn_momentum_update",
    "sinkhorn_step",
    "sinkhorn_step_reduce",
]

"""Engram: n-gram memory with a gate, and its optimiser."""

from tkbuild.ops.engram.gate import engram_gate_bwd, engram_gate_fwd
from tkbuild.ops.engram.ngram_hash import engram_hash, make_offsets
from tkbuild.ops.engram.sinkhorn import (
    engram_sinkhorn_finalize,
    engram_sinkhorn_momentum_update,
    engram_sinkhorn_step,
    engram_sinkhorn_step_reduce,
)
from tkbuild.ops.engram.weights import fused_weight, grad_w_reduce

__all__ = [
    "engram_gate_bwd",
    "engram_gate_fwd",
    "engram_hash",
    "engram_sinkhorn_finalize",
    "engram_sinkhorn_momentum_update",
    "engram_sinkhorn_step",
    "engram_sinkhorn_step_reduce",
    "fused_weight",
    "grad_w_reduce",
    "make_offsets",
]

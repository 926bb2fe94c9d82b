"""Engram, contract of release 1.0: as ``tkbuild.ops.engram`` with keys and values apart, without the optimiser."""

from tkbuild.ops.engram import engram_hash, fused_weight, grad_w_reduce, make_offsets
from tkbuild.ops.v1.engram.gate import engram_gate_bwd, engram_gate_fwd

__all__ = ["engram_gate_bwd", "engram_gate_fwd", "engram_hash", "fused_weight", "grad_w_reduce", "make_offsets"]

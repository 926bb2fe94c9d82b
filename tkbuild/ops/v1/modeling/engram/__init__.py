"""The differentiable gate of engram, contract of release 1.0."""

from tkbuild.ops.v1.modeling.engram.gate import engram_gate

__all__ = ["engram_gate"]

"""The differentiable gate of engram."""

from tkbuild.ops.modeling.engram.gate import engram_gate

__all__ = ["engram_gate"]

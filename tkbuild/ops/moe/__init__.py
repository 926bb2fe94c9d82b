"""Mixture of experts: gating, routing, expand and reduce."""

from tkbuild.ops.moe.gates import topk_gate

__all__ = ["topk_gate"]

"""References of the mixture-of-experts kernels."""

from tkbuild.reference.moe.gates import topk_gate

__all__ = ["topk_gate"]

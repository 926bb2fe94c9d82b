"""Layers with gradients, contract of release 1.0: as ``tkbuild.ops.modeling``, but for the gate's keys and values."""

from tkbuild.ops.modeling import mhc, moe
from tkbuild.ops.v1.modeling import engram

__all__ = ["engram", "mhc", "moe"]

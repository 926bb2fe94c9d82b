"""Layers with gradients, contract of release 1.0: as ``tkbuild.ops.modeling``, but for the gate's keys and values, and where the
hyper-connections lie."""

from tkbuild.ops.modeling import moe
from tkbuild.ops.v1.modeling import engram, mhc

__all__ = ["engram", "mhc", "moe"]

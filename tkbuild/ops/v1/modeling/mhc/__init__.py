"""Hyper-connections around a layer, where release 1.0 has them; their parts are in ``ops``."""

from tkbuild.ops.modeling.mhc import expand_from_embedding, mhc_head, mhc_pre
from tkbuild.ops.v1.modeling.mhc import ops

__all__ = ["expand_from_embedding", "mhc_head", "mhc_pre", "ops"]

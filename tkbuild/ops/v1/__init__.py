"""Drop-in for release 1.0 of TileKernels: ``import tkbuild.ops.v1 as tile_kernels``."""

from tkbuild.ops import config, mhc, transpose
from tkbuild.ops.config import get_device_num_sms, get_num_sms, set_num_sms
from tkbuild.ops.v1 import engram, modeling, moe, quant

__all__ = ["config", "engram", "get_device_num_sms", "get_num_sms", "mhc", "modeling", "moe", "quant", "set_num_sms", "transpose"]

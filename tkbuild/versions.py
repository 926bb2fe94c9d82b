"""The versions that tkbuild is and is built from; pyproject.toml repeats some, and a test compares them."""

from __future__ import annotations

from tkbuild import __version__

TKBUILD_VERSION = __version__

TILELANG_VERSION = "0.1.15"

CUDA_VERSION = "13.5.0"
# The meta-package pins only the parts that are asked for, and the parts do not pin each other.
CUDA_REQUIREMENTS = (
    f"cuda-toolkit[nvcc,crt,nvvm,cudart,cccl]=={CUDA_VERSION}",
    "nvidia-cuda-cuobjdump==13.5.37",
    "nvidia-cuda-nvdisasm==13.5.37",
)

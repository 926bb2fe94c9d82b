"""Stands for lower_worker.py without TileLang: the same server, with a ``lower`` that copies its source into CUDA text.

Lines of the source steer it: ``fail``, ``hang``, ``crash``, ``import NAME``.
"""

from __future__ import annotations

import importlib
import os
import sys
import time
import types
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tkbuild.errors import LowerError


@dataclass(frozen=True)
class Lowered:
    """What the real ``lower`` returns."""

    cuda_source: str
    launch_facts: dict[str, Any]


def lower(source: str, *, arch: str, pass_configs: Mapping[str, Any], import_dir: Path | None = None) -> Lowered:
    """Copy ``source``; say something on the way, as TileLang does."""
    print("lowering for", arch)
    sys.path.insert(0, str(import_dir))
    for line in source.splitlines():
        if line == "fail":
            raise LowerError("the template is wrong")
        if line == "hang":
            time.sleep(300)
        if line == "crash":
            os.abort()
        if line.startswith("import "):
            source += importlib.import_module(line.split()[1]).TEXT
    launch = {
        "function": "kernel_kernel",
        "params": [{"pointer": "x"}],
        "grid": ["T", 1, 1],
        "block": [128, 1, 1],
        "cluster": [1, 1, 1],
        "dynamic_smem_bytes": 0,
        "cooperative": False,
        "programmatic": False,
    }
    return Lowered(f"#include <common.h>\n// {arch}\n{source}\n", {"tensor_maps": [], "launches": [launch]})


if __name__ == "__main__":
    module = types.ModuleType("tkbuild.lower")
    module.lower = lower  # type: ignore[attr-defined]
    sys.modules["tkbuild.lower"] = module
    from tkbuild.lower_worker import serve

    serve(warm_up="")

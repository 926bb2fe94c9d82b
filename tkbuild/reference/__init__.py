"""Torch references of the kernels, one module a family: plain torch, right on any device, never modifying their inputs.

``import tkbuild.reference`` is enough: ``tkbuild.reference.quant`` and the other families are imported when they are named.
"""

import importlib
from types import ModuleType

_FAMILIES = ("engram", "examples", "mhc", "moe", "quant", "rand", "transform", "transpose")


def __getattr__(name: str) -> ModuleType:
    if name not in _FAMILIES:
        raise AttributeError(f"tkbuild.reference has no family {name}; there are: {', '.join(_FAMILIES)}")
    return importlib.import_module(f"{__name__}.{name}")


def __dir__() -> list[str]:
    return [*globals(), *_FAMILIES]

"""What the installed tools contribute to keys."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from tkbuild.digest import file_digest, key_digest, package_digest
from tkbuild.toolchain import TileLangPackage, Toolchain

# tkbuild's own part in lowering is keyed by content: lowering again is cheap, and a forgotten version number is not.
_LOWERING_FILES = ("lower.py", "lower_worker.py")


@dataclass(frozen=True)
class BuildFacts:
    """What the tools contribute to keys: names and versions for the reader, digests for the content."""

    lowering: Mapping[str, str]
    compiling: Mapping[str, str]


def build_facts(toolchain: Toolchain, tilelang: TileLangPackage) -> BuildFacts:
    """Return the facts of the installed tools. They hold no path and no time, so equal installations have equal facts."""
    tvm_ffi = importlib.metadata.distribution("apache-tvm-ffi")
    lowering = {
        "tilelang": f"{tilelang.version} {tilelang.digest}",
        "apache-tvm-ffi": f"{tvm_ffi.version} {package_digest(tvm_ffi)}",
        "tkbuild lowering": own_digest(_LOWERING_FILES),
    }
    compiling = {
        "cuda": toolchain.release,
        "host compiler": toolchain.host_release,
        "clock of cicc": "stands still",
        "tilelang headers": tilelang.headers_digest,
        **{f"cuda {part}": digest for part, digest in toolchain.digests.items()},
    }
    return BuildFacts(lowering, compiling)


def own_digest(names: Iterable[str]) -> str:
    """Return the digest of files of tkbuild itself."""
    folder = Path(__file__).parent
    return key_digest(1, {name: file_digest(folder / name) for name in names})

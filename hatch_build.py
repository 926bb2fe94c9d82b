"""Build the native launcher and tag the wheel with the host it is for."""

from __future__ import annotations

import hashlib
import os
import platform
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

LAUNCHER_DIR = Path("tkbuild") / "launcher"
LIBRARY_NAME = "libtkbuild_launcher.so"
GLIBC = "2.28"
ARCHS = ("x86_64", "aarch64")
# The library uses libc only, so that it cannot clash with another C++ runtime in the process.
FLAGS = (
    "-std=c++20",
    "-O2",
    "-fPIC",
    "-fno-exceptions",
    "-fno-rtti",
    "-fno-sanitize=all",
    "-fvisibility=hidden",
    "-nostdlib++",
    "-Wall",
    "-Wextra",
    "-Werror",
    "-shared",
    "-Wl,--build-id=none",
    "-Wl,-soname," + LIBRARY_NAME,
    "-s",
)


def host_arch() -> str:
    """Return the arch of this machine as manylinux tags spell it."""
    machine = platform.machine().lower()
    return {"amd64": "x86_64", "arm64": "aarch64"}.get(machine, machine)


def launcher_sources(root: Path) -> list[Path]:
    """Return the sources and headers of the launcher under ``root``, sorted."""
    folder = root / LAUNCHER_DIR
    return sorted(path for path in folder.iterdir() if path.suffix in {".cc", ".h"})


def ffi_include_dirs() -> list[Path]:
    """Return the include folder of apache-tvm-ffi. Importing tvm_ffi would import torch, if that is installed."""
    distribution = metadata.distribution("apache-tvm-ffi")
    return [Path(str(distribution.locate_file("tvm_ffi/include")))]


def compile_command(root: Path, arch: str, output: Path) -> list[str]:
    """Return the command that compiles the launcher for ``arch`` into ``output``, to be run in ``root``."""
    if arch not in ARCHS:
        raise ValueError(f"TKBUILD_LAUNCHER_ARCH: {arch!r} is not known; use one of: {', '.join(ARCHS)}")
    sources = [str(path.relative_to(root)) for path in launcher_sources(root) if path.suffix == ".cc"]
    includes = [flag for folder in ffi_include_dirs() for flag in ("-isystem", str(folder))]
    target = ["-target", f"{arch}-linux-gnu.{GLIBC}"]
    return [sys.executable, "-m", "ziglang", "c++", *target, *FLAGS, *includes, *sources, "-o", str(output)]


def sources_digest(root: Path, arch: str) -> str:
    """Return the sha256 of everything that goes into the library: sources, flags, arch, compiler and header versions."""
    versions = [f"{name}={metadata.version(name)}" for name in ("ziglang", "apache-tvm-ffi")]
    digest = hashlib.sha256()
    for field in (arch, GLIBC, *FLAGS, *versions):
        digest.update(f"{len(field)}:{field}".encode())
    for path in launcher_sources(root):
        content = path.read_bytes()
        digest.update(f"{path.name}:{len(content)}:".encode() + content)
    return digest.hexdigest()


def compile_launcher(root: Path, arch: str, output: Path) -> None:
    """Compile the launcher for ``arch`` and put it at ``output`` in one step.

    Raises: RuntimeError with the compiler's text.
    """
    with tempfile.TemporaryDirectory(dir=output.parent, prefix=".launcher-") as folder:
        built = Path(folder) / LIBRARY_NAME
        command = compile_command(root, arch, built)
        done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise RuntimeError(f"compiling the launcher for {arch} failed:\n{' '.join(command)}\n{done.stderr}")
        built.chmod(0o755)
        built.replace(output)


def ensure_launcher(root: Path, arch: str, output: Path) -> Path:
    """Return ``output``, the library for ``arch``, compiled again only if what goes into it has changed."""
    stamp = output.with_suffix(".stamp")
    digest = sources_digest(root, arch)
    if output.is_file() and stamp.is_file() and stamp.read_text() == digest:
        return output
    output.parent.mkdir(parents=True, exist_ok=True)
    compile_launcher(root, arch, output)
    stamp.write_text(digest)
    return output


class LauncherBuildHook(BuildHookInterface[Any]):
    """Compiles the launcher before a wheel or an editable install, and sets the wheel's tag.

    An editable install finds the library in the source tree. Wheels take theirs from ``build/``, so that one for another
    arch leaves an editable install as it is.
    """

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Build for ``TKBUILD_LAUNCHER_ARCH``, by default the arch of this machine."""
        root = Path(self.root)
        arch = os.environ.get("TKBUILD_LAUNCHER_ARCH") or host_arch()
        in_tree = LAUNCHER_DIR / LIBRARY_NAME
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-manylinux_{GLIBC.replace('.', '_')}_{arch}"
        if version == "editable":
            ensure_launcher(root, arch, root / in_tree)
            return
        library = ensure_launcher(root, arch, root / "build" / "launcher" / arch / LIBRARY_NAME)
        build_data["force_include"][str(library)] = in_tree.as_posix()

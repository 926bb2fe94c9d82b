"""What is wrong with a serving image, and the command that mends it. Starts no process and writes nothing."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from tkbuild.errors import NoVariantError, TkbuildError
from tkbuild.manifest import CHECKS_NAME
from tkbuild.runtime.launcher import native
from tkbuild.runtime.registry import registry


@dataclass(frozen=True)
class Finding:
    """One thing looked at: what was found, and if it is not well, what to do."""

    what: str
    ok: bool
    found: str
    mend: str = ""

    def text(self) -> str:
        return f"{'ok  ' if self.ok else 'FAIL'}  {self.what}: {self.found}" + (f"\n      {self.mend}" if self.mend else "")

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def examine() -> list[Finding]:
    """Return a finding each on torch, the native launcher, the driver, the devices and the installed kernel wheels."""
    findings = [
        _look("torch", lambda: torch.__version__, "pip install 'torch>=2.10'"),
        _look("native launcher", lambda: f"loaded, {native() and 'ready'}", "pip install --force-reinstall tkbuild"),
        _look(
            "CUDA driver",
            lambda: "supports CUDA {}.{}".format(*native().driver_version()),
            "run on a machine with an NVIDIA driver",
        ),
        _look("kernel wheels", _wheels, "pip install tkbuild-kernels-sm90a (Hopper) or tkbuild-kernels-sm100a (Blackwell)"),
    ]
    if findings[2].ok:
        findings += [_device(index) for index in range(native().device_count())]
    return findings


def _look(what: str, ask: Callable[[], str], mend: str) -> Finding:
    try:
        return Finding(what, True, ask())
    except TkbuildError as exc:
        return Finding(what, False, str(exc), mend)


def _wheels() -> str:
    providers = registry().providers
    if not providers:
        raise NoVariantError("none installed")
    return ", ".join(f"{m.name} {m.version} ({len(m.variants)} variants for {m.arch})" for _, m in providers)


def _device(index: int) -> Finding:
    capability = native().compute_capability(index)
    fitting = [v for v in registry().all_variants() if v.arch.runs_on(capability)]
    found = f"compute capability {capability[0]}.{capability[1]}, {len(fitting)} installed variants run on it"
    mend = "" if fitting else f"install the kernel wheel for compute capability {capability[0]}.{capability[1]}"
    return Finding(f"cuda:{index}", bool(fitting), found, mend)


def profile_patterns(profile: str) -> list[str]:
    """Return the patterns that ``profile`` stands for.

    profile: the name of a profile that an installed wheel was built from, a file with one pattern a line, or a pattern.
    """
    path = Path(profile)
    if path.is_file():
        lines = (line.split("#")[0].strip() for line in path.read_text("utf-8").splitlines())
        return [line for line in lines if line]
    for root, _manifest in registry().providers:
        profiles = json.loads((root / CHECKS_NAME).read_text("utf-8"))["profiles"]
        if profile in profiles:
            return list(profiles[profile])
    return [profile]

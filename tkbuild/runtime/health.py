"""What is wrong with a serving image, and the command that mends it. Starts no process and writes nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from tkbuild.arch import TargetArch
from tkbuild.errors import ArgumentError, NoVariantError, PackageError, TkbuildError, pip_install
from tkbuild.runtime.launcher import native
from tkbuild.runtime.registry import install_kernels, read_profiles, registry
from tkbuild.runtime.select import install_for


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
        _look("native launcher", lambda: f"loaded, {native() and 'ready'}", pip_install("tkbuild")),
        _look(
            "CUDA driver",
            lambda: "supports CUDA {}.{}".format(*native().driver_version()),
            "run on a machine with an NVIDIA driver",
        ),
        _look("kernel wheels", _wheels),
    ]
    if findings[2].ok:
        findings += [_device_or_error(index) for index in range(native().device_count())]
    return findings


def _look(what: str, ask: Callable[[], str], mend: str = "") -> Finding:
    try:
        return Finding(what, True, ask())
    except TkbuildError as exc:
        return Finding(what, False, str(exc), mend)


def _wheels() -> str:
    providers = registry().providers
    if not providers:
        raise NoVariantError(f"none installed; {install_kernels()}")
    for variant in registry().all_variants():
        variant.cubin()
    for root, manifest in providers:
        read_profiles(root, manifest)
    if notes := [*registry().clashes.values(), *registry().shadowed.values()]:
        raise PackageError("; ".join(notes))
    return ", ".join(f"{m.name} {m.version} ({len(m.variants)} variants for {m.arch})" for _, m in providers)


def _device_or_error(index: int) -> Finding:
    try:
        return _device(index)
    except TkbuildError as exc:
        return Finding(f"cuda:{index}", False, str(exc))


def _device(index: int) -> Finding:
    capability = native().compute_capability(index)
    fitting = [v for v in registry().all_variants() if v.arch.runs_on(capability)]
    found = f"compute capability {capability[0]}.{capability[1]}, {len(fitting)} installed variants run on it"
    mend = "" if fitting else install_for(capability)
    return Finding(f"cuda:{index}", bool(fitting), found, mend)


def profile_patterns(profile: str, arch: str | None = None, wheel: str | None = None) -> list[str]:
    """Return the patterns that ``profile`` stands for.

    profile: the name of a profile that installed wheels were built from (all its ids, of ``arch`` if given), a file with
    one pattern a line, or a pattern.  wheel: which wheels' profile counts, by their name with or without the arch.
    Raises: ArgumentError for a profile without patterns, a file that cannot be read and a bad arch, NoVariantError where such a wheel is
    not installed, IntegrityError for a damaged checks.json.
    """
    lines = _lines(Path(profile))
    if lines is not None:
        patterns = [text for line in lines if (text := line.split("#")[0].strip())]
    else:
        patterns = _installed_patterns(profile, arch, wheel)
    if not profile or not patterns:
        raise ArgumentError(f"profile {profile!r} names no pattern, expected at least one, such as 'quant.*'", profile=profile)
    return patterns


def _lines(path: Path) -> list[str] | None:
    if len(path.parts) > 1 and not path.exists():
        raise ArgumentError(f"{path}: no such file; give a profile, a pattern, or a file with one pattern a line", path=str(path))
    try:
        return path.read_text("utf-8").splitlines() if path.is_file() else None
    except (OSError, UnicodeDecodeError) as exc:
        raise ArgumentError(f"{path}: {exc}; give a readable UTF-8 file with one pattern a line", path=str(path)) from exc


def _installed_patterns(profile: str, arch: str | None, wheel: str | None) -> list[str]:
    wanted = None if arch is None else TargetArch.parse(arch)
    providers = [(root, manifest) for root, manifest in registry().providers if wanted in (None, TargetArch.parse(manifest.arch))]
    if wheel is not None:
        providers = [(root, m) for root, m in providers if m.name in (wheel, f"{wheel}-{TargetArch.parse(m.arch).wheel_suffix}")]
        if not providers:
            have = ", ".join(sorted(manifest.name for _, manifest in registry().providers)) or "none"
            suffix = f"-{wanted.wheel_suffix}" if wanted else ""
            raise NoVariantError(
                f"no kernel wheel {wheel} is installed{f' for {wanted}' if wanted else ''}; installed: {have}; "
                f"{pip_install(wheel.removesuffix(suffix) + suffix)}",
                wheel=wheel,
            )
    known = [read_profiles(*one) for one in providers]
    asked = [profiles[profile] for profiles in known if profile in profiles]
    if known and not asked and profile.isidentifier():  # names of kernels have a dot
        names = (
            ", ".join(sorted({name for profiles in known for name in profiles})) or "none (wheels of a part of a profile have none)"
        )
        raise ArgumentError(f"no profile {profile!r} in the installed kernel wheels; there are: {names}", profile=profile)
    return list(dict.fromkeys(one for ids in asked for one in ids)) if asked else [profile]

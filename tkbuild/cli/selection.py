"""What the selecting options of a command line stand for."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tkbuild.arch import TargetArch, target_profile
from tkbuild.errors import SpecError
from tkbuild.specs import PROFILES_FOLDER, load_profiles, load_specs
from tkbuild.variants import Variant, select


def parse_archs(archs: Sequence[str]) -> tuple[TargetArch, ...]:
    """Return the archs of repeated ``--arch``.

    Raises: ArgumentError with the nearest right spelling, also for an arch that tkbuild does not compile for.
    """
    parsed = tuple(TargetArch.parse(arch) for arch in archs)
    for arch in parsed:
        target_profile(arch)
    return parsed


def selected(patterns: Sequence[str], specs_dir: Path, profile: str, archs: Sequence[str]) -> list[Variant]:
    """Return the variants a command line selects. Raises: SpecError, PatternError, ArgumentError."""
    specs = load_specs(specs_dir)
    profiles = load_profiles(specs_dir)
    if profile not in profiles:
        raise SpecError(
            f"no profile {profile!r} in {specs_dir / PROFILES_FOLDER}; there are: {', '.join(sorted(profiles)) or 'none'}",
            problems=(),
        )
    return select(specs, patterns, parse_archs(archs), profiles[profile])

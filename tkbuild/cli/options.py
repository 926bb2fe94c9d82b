"""Options that several commands share, and what they stand for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click

from tkbuild.arch import TargetArch, target_profile
from tkbuild.errors import SpecError
from tkbuild.specs import PROFILES_FOLDER, load_profiles, load_specs
from tkbuild.variants import Variant, select

_F = TypeVar("_F", bound=Callable[..., Any])

patterns_argument = click.argument("patterns", nargs=-1, metavar="[PATTERN]...")
json_option = click.option("--json", "as_json", is_flag=True, help="One JSON object a line.")
specs_option = click.option(
    "--specs",
    "specs_dir",
    type=click.Path(path_type=Path),
    default=Path("kernel_specs"),
    envvar="TKBUILD_SPECS",
    show_default=True,
    help="Folder of kernel specs.",
)
store_option = click.option(
    "--store", default="artifacts", envvar="TKBUILD_STORE", show_default=True, help="Artifact store: a folder."
)
profile_option = click.option("--profile", default="default", show_default=True, help="Profile that says what to build.")
arch_option = click.option("--arch", "archs", multiple=True, metavar="ARCH", help="Target, such as sm_90a; may be repeated.")


def selection_options(command: _F) -> _F:
    """Add what chooses variants: patterns, --specs, --profile, --arch."""
    for option in (arch_option, profile_option, specs_option, patterns_argument):
        command = option(command)
    return command


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

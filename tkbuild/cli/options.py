"""Options that several commands share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

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
cuda_home_option = click.option("--cuda-home", envvar="TKBUILD_CUDA_HOME", help="CUDA toolkit to use instead of the pinned one.")
remote_option = click.option(
    "--remote", envvar="TKBUILD_REMOTE", help="URL of a shared store: asked on a miss, given what is built."
)
profile_option = click.option("--profile", default="default", show_default=True, help="Profile that says what to build.")
arch_option = click.option("--arch", "archs", multiple=True, metavar="ARCH", help="Target, such as sm_90a; may be repeated.")


def selection_options(command: _F) -> _F:
    """Add what chooses variants: patterns, --specs, --profile, --arch."""
    for option in (arch_option, profile_option, specs_option, patterns_argument):
        command = option(command)
    return command

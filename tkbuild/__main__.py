"""The ``tkbuild`` command: says what to install where the compile extra is missing, else hands over to ``tkbuild.cli``."""

from __future__ import annotations

import gc
import importlib.util
import sys

from tkbuild.errors import MissingPackageError

#: Imports and plans make many objects that stay; looking for garbage among them takes a sixth of a run that has nothing to do.
_GC_THRESHOLD = 100_000
_NEEDED = {"click": "click", "yaml": "pyyaml", "jinja2": "jinja2"}


def main() -> None:
    """Run the command line of this process and exit with its code."""
    gc.set_threshold(_GC_THRESHOLD)
    missing = [package for module, package in _NEEDED.items() if importlib.util.find_spec(module) is None]
    if missing:
        sys.stderr.write(
            f"tkbuild: the command line needs {', '.join(missing)}: pip install 'tkbuild[compile]'\n"
            "in a serving image use: python -m tkbuild.runtime list|doctor|require PROFILE\n"
        )
        sys.exit(MissingPackageError.exit_code)
    from tkbuild.cli import run

    try:
        run()
    finally:
        gc.freeze()  # what is left is freed with the process; looking for garbage in it first is the slowest part of leaving


if __name__ == "__main__":
    main()

"""The one thing ``python -m tkbuild.runtime`` can say where torch cannot be imported."""

from __future__ import annotations

import json
import sys

from tkbuild.errors import MissingPackageError


def end_command_without_torch(exc: ImportError) -> None:
    """End the process with one line on stderr if it is that command and torch is what failed; otherwise return."""
    if "torch" in sys.modules or not _is_our_command():
        return
    code = MissingPackageError.exit_code
    message = f"torch is missing: {' '.join(str(exc).split())}; pip install 'torch>=2.10'"
    sys.stderr.write(f"error: {message}\n")
    if "--json" in sys.argv:
        error = {"error": MissingPackageError.__name__, "message": message, "exit_code": code}
        sys.stdout.write(json.dumps(error, sort_keys=True) + "\n")
    sys.exit(code)


def _is_our_command() -> bool:
    """Whether the interpreter was started with ``-m tkbuild.runtime`` and is still looking for that module."""
    return sys.argv[:1] == ["-m"] and not {"tkbuild.runtime", "-mtkbuild.runtime"}.isdisjoint(sys.orig_argv)

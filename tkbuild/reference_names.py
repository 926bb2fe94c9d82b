"""Which references ``tkbuild.reference`` has, read off its files: importing them would import torch."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

_FOLDER = Path(__file__).parent / "reference"


@functools.cache
def reference_names() -> tuple[str, ...]:
    """Return every ``family.function``, sorted."""
    files = {path.stem: path for path in _FOLDER.glob("*.py") if path.stem != "__init__"}
    files |= {path.parent.name: path for path in _FOLDER.glob("*/__init__.py")}
    return tuple(sorted(f"{family}.{name}" for family, path in files.items() for name in _public_names(path)))


def _public_names(path: Path) -> Iterator[str]:
    for node in ast.parse(path.read_text("utf-8")).body:
        if isinstance(node, ast.ImportFrom):
            yield from (alias.asname or alias.name for alias in node.names if (node.module or "").startswith("tkbuild.reference"))
        elif isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
            yield node.name

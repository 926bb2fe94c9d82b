"""Which references ``tkbuild.reference`` and a project have, read off their files: importing them would import torch."""

from __future__ import annotations

import ast
import difflib
import functools
import importlib.machinery
from collections.abc import Iterator, Sequence
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


def own_reference_problem(name: str, folders: Sequence[Path]) -> str | None:
    """Return what is wrong with ``module:function``, as far as the files in ``folders`` tell.

    A module that is in none of them may be on the path where kernels are verified, unless it is nearly one that is there.
    """
    module, _, function = name.partition(":")
    places = [folder / module.replace(".", "/") for folder in folders]
    files = [file for place in places for file in (Path(f"{place}.py"), place / "__init__.py") if file.is_file()]
    if files:
        problems = [_lack_of(file, function) for file in files]
        return problems[0] if all(problems) else None
    if importlib.machinery.PathFinder.find_spec(module.partition(".")[0]) is None:
        there = {file.stem: file for folder in folders for file in folder.glob("*.py")}
        for near in difflib.get_close_matches(module, there, n=1, cutoff=0.8):
            return f"no module {module}; did you mean that in {there[near]}?"
    return None


def _lack_of(file: Path, function: str) -> str | None:
    """Return what keeps the module in ``file`` from having ``function``; None also where only an import could tell."""
    try:
        nodes = list(ast.walk(ast.parse(file.read_text("utf-8"))))
    except SyntaxError as exc:
        return f"{file}:{exc.lineno}: {exc.msg}"
    except (OSError, ValueError):
        return None
    names = {name for node in nodes for name in _bound_names(node)}
    if names & {function, "*", "__getattr__"}:
        return None
    near = difflib.get_close_matches(function, names, n=1)
    return f"{file} has no {function}" + (f"; did you mean {near[0]}?" if near else "")


def _bound_names(node: ast.AST) -> Iterator[str]:
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        yield node.name
    elif isinstance(node, ast.alias):
        yield (node.asname or node.name).partition(".")[0]
    elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        yield node.id

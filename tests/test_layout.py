"""Who may import whom: one table, read from the sources, so that nothing crosses from serving to building."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "tkbuild"
LEAVES = {
    "errors",
    "dtypes",
    "digest",
    "arch",
    "expr",
    "signature",
    "launchplan",
    "manifest",
    "checks",
    "elf",
    "versions",
    "collector",
}
SERVING = {"torch", "tvm_ffi"}

#: part of tkbuild -> what it may import beside the standard library, the leaves and itself.
ALLOWED = {
    **{leaf: set() for leaf in LEAVES},
    "schema": set(),
    "kernelspec": {"schema", "speccheck"},
    "flags": set(),
    "reference_names": set(),
    "speccheck": {"schema", "reference_names", "flags"},
    "specs": {"yaml", "kernelspec", "schema"},
    "variants": {"kernelspec"},
    "render": {"jinja2", "variants"},
    "workfolder": set(),
    "toolchain": {"workfolder"},
    "forking": {"toolchain"},
    "facts": {"toolchain"},
    "memo": {"facts", "store"},
    "build_options": set(),
    "plan": {"facts", "variants", "render", "flags"},
    "lower": {"tilelang", "tvm", "torch"},
    "lower_worker": {"lower", "forking"},
    "lowering": {"plan", "forking", "toolchain", "workfolder"},
    "frontend": {"toolchain", "forking"},
    "compile": {"toolchain", "frontend", "workfolder"},
    "store": {"workfolder"},
    "remote_store": {"store"},
    "stored": {"facts", "plan", "store"},
    "machine": set(),
    "schedule": {"plan", "frontend", "machine"},
    "build": {"build_options", "plan", "lowering", "compile", "store", "stored", "schedule", "toolchain", "workfolder"},
    "wheel": set(),
    "launcher": set(),
    "runtime": {*SERVING, "launcher"},
    "ops": {"torch", "runtime"},
    "reference": {"torch"},
    "fills": {"torch"},
    "cases": {"torch", "fills"},
    "verify": {"torch", "cases", "runtime"},
    "peers": {"torch", "cases"},
    "bench": {"torch", "cases", "verify", "peers", "runtime"},
    "cli": {"click", "torch", "*"},
    "__main__": {"cli"},
    "__init__": set(),
}
BUILD_ONLY = {"tilelang", "tvm", "jinja2", "yaml", "click"}
SERVED = ("runtime", "ops", "reference", "launcher", *sorted(LEAVES))


def modules() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def part_of(path: Path) -> str:
    first = path.relative_to(PACKAGE).parts[0]
    return first.removesuffix(".py")


def imported(path: Path) -> Iterator[str]:
    """The parts of tkbuild and the third-party packages that a module names in its imports."""
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names = [f"{node.module}.{alias.name}" if node.module == "tkbuild" else str(node.module) for alias in node.names]
        else:
            continue
        for name in names:
            top, _, rest = name.partition(".")
            if top == "tkbuild":
                part = rest.partition(".")[0]
                yield "__init__" if part in ("", "__version__") else part
            elif top not in sys.stdlib_module_names:
                yield top


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_follow_the_table(path: Path) -> None:
    part = part_of(path)
    allowed = ALLOWED[part] | LEAVES | {part, "__init__"}
    surplus = set() if "*" in allowed else set(imported(path)) - allowed
    assert surplus == set(), f"{part} may not import {', '.join(sorted(surplus))}"


@pytest.mark.parametrize("part", SERVED)
def test_serving_parts_name_no_build_package(part: str) -> None:
    for path in modules():
        if part_of(path) == part:
            assert set(imported(path)) & BUILD_ONLY == set()


def test_the_load_path_runs_no_stored_code() -> None:
    forbidden = {"pickle", "marshal", "shelve", "dill", "cloudpickle"}
    for path in modules():
        if part_of(path) in ("runtime", "store", "remote_store", "launcher", *LEAVES):
            tree = ast.parse(path.read_text("utf-8"))
            called = {node.func.id for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}
            named = set(_all_imports(tree))
            assert called & {"eval", "exec", "compile", "__import__"} == set(), path
            assert named & forbidden == set(), path


def _all_imports(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield str(node.module).partition(".")[0]


def test_every_part_is_in_the_table() -> None:
    assert {part_of(path) for path in modules()} == set(ALLOWED)

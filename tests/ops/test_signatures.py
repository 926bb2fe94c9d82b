"""Drop-ins: the public functions of both releases have their names, parameters and defaults here.

The golden file has what the packages themselves define (2.1.0 and 1.0.0), but for what concerns other devices than GPUs.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import json
from pathlib import Path

import pytest

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "public_signatures.json").read_text("utf-8"))
NAMESPACES = {"2.1": "tkbuild.ops", "1.0": "tkbuild.ops.v1"}
_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
CASES = [(release, name) for release, names in GOLDEN.items() for name in names]


@pytest.mark.parametrize(("release", "name"), CASES, ids=lambda text: text)
def test_a_call_of_the_release_is_a_call_here(release: str, name: str) -> None:
    *modules, function = name.split(".")
    found = importlib.import_module(NAMESPACES[release])
    for module in modules:
        found = getattr(found, module)
    ours = inspect.signature(getattr(found, function)).parameters
    takes_any = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in ours.values())
    wanted = ast.parse(f"def f({GOLDEN[release][name]}): ...").body[0].args
    positional = [one.arg for one in wanted.args]
    assert list(ours)[: len(positional)] == positional
    optional = {one.arg: default for one, default in zip(wanted.kwonlyargs, wanted.kw_defaults, strict=True)}
    optional |= dict(zip(positional[len(positional) - len(wanted.defaults) :], wanted.defaults, strict=True))
    if not takes_any:
        assert {one: repr(ours[one].default) for one in optional} == {one: ast.unparse(value) for one, value in optional.items()}
    required = {one.name for one in ours.values() if one.default is inspect.Parameter.empty and one.kind in _NAMED}
    assert required <= set(positional) - set(optional)

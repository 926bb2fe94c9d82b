"""errors: exit codes, facts as attributes, pickling, and what importing costs."""

import pickle
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tkbuild import errors

CLASSES = [cls for cls in vars(errors).values() if isinstance(cls, type) and issubclass(cls, errors.TkbuildError)]


def test_every_kind_of_failure_has_its_own_exit_code() -> None:
    codes = [cls.exit_code for cls in CLASSES]
    assert sorted(codes) == [*range(1, 18), 20]


def test_facts_are_attributes_and_missing_facts_are_attribute_errors() -> None:
    error = errors.NoVariantError("no variant", kernel="moe.gate", rejected=("a", "b"))
    assert str(error) == error.message == "no variant"
    assert error.kernel == "moe.gate"
    assert error.facts == {"kernel": "moe.gate", "rejected": ("a", "b")}
    with pytest.raises(AttributeError, match=r"no fact 'kernal'; it has: kernel, rejected"):
        _ = error.kernal


@pytest.mark.parametrize("cls", CLASSES)
def test_errors_cross_process_borders_with_their_facts(cls: type[errors.TkbuildError]) -> None:
    copy = pickle.loads(pickle.dumps(cls("text", where="here")))
    assert type(copy) is cls
    assert (str(copy), copy.where) == ("text", "here")


def test_argument_errors_are_value_errors() -> None:
    with pytest.raises(ValueError, match="bad"):
        raise errors.ArgumentError("bad")


def test_advice_to_install_a_wheel_leaves_torch_alone() -> None:
    """With dependencies, --force-reinstall and --upgrade replace torch; what installs an extra of tkbuild finds tkbuild installed."""
    assert "--no-deps" in errors.pip_install("tkbuild")
    package = Path(errors.__file__).parent
    advice = [line for path in package.rglob("*.py") for line in path.read_text("utf-8").splitlines() if "pip install" in line]
    careless = re.compile(r"pip install (?!--no-deps)[^'`]*\b(tkbuild(?!\[)|the kernel wheel)|pip install --(force|upgrade)")
    assert len(advice) > 5
    assert [line for line in advice if careless.search(line)] == []


def test_the_leaves_import_no_third_party_package() -> None:
    code = (
        "import sys; before = set(sys.modules)\n"
        "import tkbuild.errors, tkbuild.dtypes, tkbuild.arch, tkbuild.expr, tkbuild.signature\n"
        "new = {m.partition('.')[0] for m in set(sys.modules) - before} - {'tkbuild'}\n"
        "sys.exit(str(new - set(sys.stdlib_module_names)) if new - set(sys.stdlib_module_names) else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr

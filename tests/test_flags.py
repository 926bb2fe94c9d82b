"""Compiler flags: what pass configs come to, and what a spec may not ask for."""

from __future__ import annotations

import re

import pytest

from tkbuild.errors import ArgumentError
from tkbuild.flags import compile_flags, refusal


def test_flags_mean_what_tilelang_means() -> None:
    own = ("-O3", "-std=c++20", "-diag-suppress=1444,20012", "-Xptxas=-v")
    assert compile_flags({}, []) == own
    assert compile_flags({"tl.enable_fast_math": False, "tl.ptxas_register_usage_level": None}, []) == own
    configs = {
        "tl.enable_fast_math": True,
        "tl.ptxas_register_usage_level": 7,
        "tl.device_compile_flags": "-DA=1 -DB=2",
        "tl.other": 1,
    }
    assert compile_flags(configs, ["-maxrregcount=64"]) == (
        *own,
        "-DA=1",
        "-DB=2",
        "--use_fast_math",
        "--ptxas-options=--register-usage-level=7",
        "-maxrregcount=64",
    )
    assert compile_flags({"tl.device_compile_flags": ["-DA", "-DB -DC"]}, []) == (*own, "-DA", "-DB", "-DC")


@pytest.mark.parametrize(
    "flag",
    [
        "-I/usr/include",
        "-include",
        "other.cu",
        "-lineinfo",
        "-G",
        "-g",
        "-o",
        "-arch=sm_80",
        "-gencode=x",
        "-rdc=true",
        "-ccbin=x",
        "@file",
        "-keep",
        "--system-include=x",
        "-Xcompiler=-Ix",
        "-Xptxas=-O3,-ox",
        "-save-temps",
        "-time=file",
        "-ldir=x",
    ],
)
def test_flags_that_no_key_covers_are_refused(flag: str) -> None:
    with pytest.raises(ArgumentError, match=re.escape(repr(flag))):
        compile_flags({}, [flag])
    with pytest.raises(ArgumentError, match=re.escape(repr(flag))):
        compile_flags({"tl.device_compile_flags": flag}, [])


@pytest.mark.parametrize(
    ("flag", "reason"),
    [
        ("other.cu", "names a file"),
        ("-include", "names files"),
        ("--generate-line-info", "line or debug information"),
        ("--generate-code=x", "chooses the target"),
        ("-arch=sm_80", "chooses the target"),
        ("--ptx", "what the compiler writes"),
        ("-time=file", "none of those that read and write nothing but the kernel"),
    ],
)
def test_refusal_says_why_and_what_is_allowed(flag: str, reason: str) -> None:
    text = refusal(flag)
    assert text is not None
    assert reason in text
    assert "allowed: flags about how the code itself is compiled, such as -DNAME=1" in text


@pytest.mark.parametrize(
    "flag", ["-DNAME=1", "-maxrregcount=64", "-Xptxas=-O3", "-Ofast-compile=min", "--use_fast_math", "-diag-suppress=177"]
)
def test_flags_of_the_code_are_allowed(flag: str) -> None:
    assert refusal(flag) is None

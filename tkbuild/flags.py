"""nvcc's flags for a kernel: TileLang's own and what its spec adds, and which flags a spec may not add."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from tkbuild.errors import ArgumentError

DEVICE_FLAGS_CONFIG = "tl.device_compile_flags"
REGISTER_LEVEL_CONFIG = "tl.ptxas_register_usage_level"
ALLOWED_FLAGS = "flags about how the code itself is compiled, such as -DNAME=1, -maxrregcount=64, -Xptxas=-O3"

# TileLang's own flags without -lineinfo; silence for what its headers cause in every kernel (deprecated vector types,
# needless annotations); and the assembler's report on registers and spills.
_OWN_FLAGS = ("-O3", "-std=c++20", "-diag-suppress=1444,20012", "-Xptxas=-v")
#: What a spec may add. A list of what it may not add would miss flags that read files, or write some.
_ALLOWED = re.compile(
    r"""-[DU][A-Za-z_]\w*(=.*)?
    |--?maxrregcount=\d+ | --?use_fast_math | --?(ftz|prec-div|prec-sqrt|fmad|extra-device-vectorization)=(true|false)
    |-O[0-3] | -Ofast-compile=\w+ | -std=c\+\+\d\d | -w | --?(expt-relaxed-constexpr|expt-extended-lambda|restrict)
    |--?diag-(suppress|warn|error|default|remark)=[\d,]+
    |(-Xptxas|--ptxas-options)=(-O\d|-v|-warn-spills|-dlcm=\w+|-dscm=\w+|--?(register-usage-level|maxrregcount|opt-level|def-load-cache|def-store-cache)=\w+)
    """,
    re.VERBOSE,
)
#: How other flags begin ($: the whole flag), and why they are refused.
_REFUSED = (
    (re.compile(r"(?!-)"), "it does not start with '-', so it names a file"),
    (
        re.compile(r"-lineinfo|--generate-line-info|-G|--device-debug|-g$|--debug"),
        "it adds line or debug information, which puts paths into the cubin",
    ),
    (
        re.compile(
            r"-I|-L|-isystem|--system-include|-include|--include|--pre-include|-ccbin|--compiler-bindir|-optf|--options-file"
        ),
        "it names files that no key covers; list a file the template needs under `sources`",
    ),
    (re.compile(r"-arch|--gpu|-code|-gencode|--generate"), "it chooses the target, which `targets` does"),
    (
        re.compile(
            r"-o$|--output|-rdc|--relocatable|-dc|--device-c|-ptx|--ptx|-fatbin|--fatbin|-keep|--keep|-M|-E$|--dryrun|-dryrun"
        ),
        "it changes what the compiler writes, and where, which tkbuild decides",
    ),
    (re.compile(""), "it is none of those that read and write nothing but the kernel"),
)


def refusal(flag: str) -> str | None:
    """Return why a spec may not add ``flag`` and which flags it may, or None if it may."""
    if _ALLOWED.fullmatch(flag):
        return None
    reason = next(reason for pattern, reason in _REFUSED if pattern.match(flag))
    return f"compile flag {flag!r} is refused: {reason}; allowed: {ALLOWED_FLAGS}"


def device_flags(pass_configs: Mapping[str, Any]) -> list[str]:
    """Return the flags that the pass configs add, one by one."""
    value = pass_configs.get(DEVICE_FLAGS_CONFIG)
    texts = [] if value is None else [value] if isinstance(value, str) else map(str, value)
    return [flag for text in texts for flag in text.split()]


def compile_flags(pass_configs: Mapping[str, Any], extra: Sequence[str]) -> tuple[str, ...]:
    """Return nvcc's flags for a kernel, in order: TileLang's own, what the pass configs ask for, then ``extra``.

    Target, include folders and file names are not among them. Line information never is: it puts paths into the cubin.
    Raises: ArgumentError for a flag that is not about the code alone: that names files, chooses the target or changes the kind of output.
    """
    asked = device_flags(pass_configs)
    for flag in (*asked, *extra):
        if problem := refusal(flag):
            raise ArgumentError(problem, flag=flag)
    level = pass_configs.get(REGISTER_LEVEL_CONFIG)
    flags = [*_OWN_FLAGS, *asked]
    flags += ["--use_fast_math"] if pass_configs.get("tl.enable_fast_math") else []
    flags += [f"--ptxas-options=--register-usage-level={int(level)}"] if level is not None else []
    return (*flags, *extra)

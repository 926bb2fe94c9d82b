"""``python -m tkbuild.runtime list|doctor|require``: the command of images that have the runtime only."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections import Counter
from typing import Any, NoReturn

from tkbuild.errors import ArgumentError, TkbuildError
from tkbuild.runtime import api, health
from tkbuild.runtime.registry import install_kernels, registry

Line = tuple[str, Any]
"""One line of output: its text, and what stands for it with --json."""


def _list(arguments: argparse.Namespace) -> tuple[int, list[Line]]:
    variants = registry().all_variants() if arguments.pattern is None else api.match(arguments.pattern)
    lines: list[Line] = [
        (f"{v.id}  {v.record.verified['state']}", {"id": v.id, "wheel": v.wheel, **v.record.verified}) for v in variants
    ]
    shown = {v.kernel for v in variants}
    notes = [text for kernel, text in registry().shadowed.items() if kernel in shown]
    if arguments.pattern is None:
        notes += registry().clashes.values()
        notes += [] if registry().providers else [f"no kernel wheel is installed; {install_kernels()}"]
    return 0, [*lines, *((f"note: {note}", {"note": note}) for note in notes)]


def _doctor(_arguments: argparse.Namespace) -> tuple[int, list[Line]]:
    findings = health.examine()
    return 0 if all(finding.ok for finding in findings) else 1, [(finding.text(), finding.to_json()) for finding in findings]


def _require(arguments: argparse.Namespace) -> tuple[int, list[Line]]:
    coverage = api.require(health.profile_patterns(arguments.profile, arguments.arch, arguments.wheel), arguments.arch)
    found = {one for ids in coverage.found.values() for one in ids}
    wheels = Counter(v.wheel for v in registry().all_variants() if v.id in found)
    facts = {"profile": arguments.profile, "variants": len(found), "wheels": wheels, "notes": coverage.shadowed}
    shown = ", ".join(f"{count} of {name}" for name, count in wheels.items())
    notes = "".join(f"\nnote: {note}" for note in coverage.shadowed)
    return 0, [(f"{arguments.profile}: {len(found)} variants installed and intact ({shown}){notes}", facts)]


def _write(text: str) -> bool:
    """Write to stdout; returns whether its reader took it."""
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except OSError:
        # What is left in the buffer would fail again, loudly, when the interpreter ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return False
    return True


def main(argv: list[str]) -> int:
    """Run one command; returns its exit code."""
    as_json = "--json" in argv
    try:
        arguments = _parser().parse_args(argv)
        code, lines = arguments.run(arguments)
    except TkbuildError as exc:
        if as_json:
            _write(
                json.dumps({"error": type(exc).__name__, "message": str(exc), "exit_code": exc.exit_code}, sort_keys=True) + "\n"
            )
        else:
            sys.stderr.write(f"error: {exc}\n")
        return exc.exit_code
    texts = [json.dumps(value, sort_keys=True) if as_json else text for text, value in lines]
    return int(code) if _write("".join(f"{text}\n" for text in texts)) else int(code) or 1


class _Parser(argparse.ArgumentParser):
    """A wrong command line is an error like any other, with its exit code and JSON."""

    def error(self, message: str) -> NoReturn:
        raise ArgumentError(f"{message}; `{self.prog} --help` says what there is")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="python -m tkbuild.runtime")
    commands = parser.add_subparsers(required=True)
    listing = commands.add_parser("list", help="installed variants and whether they were verified")
    listing.add_argument("pattern", nargs="?", help="a glob over kernel names and variant ids; everything without it")
    listing.set_defaults(run=_list)
    doctor = commands.add_parser("doctor", help="driver, devices, launcher and kernel wheels")
    doctor.set_defaults(run=_doctor)
    require = commands.add_parser("require", help="fail unless the variants of a profile are installed and intact")
    require.add_argument("profile", help="a profile that the wheels were built from, a pattern, or a file with one pattern a line")
    require.add_argument("--arch", help="only variants of this arch count")
    require.add_argument("--wheel", help="whose profile it is, such as tkbuild-kernels; any installed wheel's without it")
    require.set_defaults(run=_require)
    for command in (listing, doctor, require):
        command.add_argument("--json", action="store_true", help="one JSON object a line")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

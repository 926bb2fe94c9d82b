"""``python -m tkbuild.runtime list|doctor|require PROFILE|verify|bench``: the command of images that have the runtime only."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from tkbuild.errors import TkbuildError
from tkbuild.runtime import api, health
from tkbuild.runtime.registry import registry


def _list(arguments: argparse.Namespace) -> int:
    for variants in registry().variants.values():
        for variant in variants:
            if api.matches(variant, arguments.pattern):
                _say(arguments, f"{variant.id}  {variant.record.verified['state']}", {"id": variant.id, **variant.record.verified})
    return 0


def _doctor(arguments: argparse.Namespace) -> int:
    findings = health.examine()
    for finding in findings:
        _say(arguments, finding.text(), finding.to_json())
    return 0 if all(finding.ok for finding in findings) else 1


def _require(arguments: argparse.Namespace) -> int:
    patterns = health.profile_patterns(arguments.profile)
    coverage = api.require(patterns, arguments.arch)
    count = sum(map(len, coverage.found.values()))
    _say(
        arguments, f"{arguments.profile}: {count} variants installed and intact", {"profile": arguments.profile, "variants": count}
    )
    return 0


def _say(arguments: argparse.Namespace, text: str, value: Any) -> None:
    sys.stdout.write((json.dumps(value, sort_keys=True) if arguments.json else text) + "\n")


def main(argv: list[str]) -> int:
    """Run one command; returns its exit code."""
    parser = argparse.ArgumentParser(prog="python -m tkbuild.runtime")
    commands = parser.add_subparsers(required=True)
    listing = commands.add_parser("list", help="installed variants and whether they were verified")
    listing.add_argument("pattern", nargs="?", default="*")
    listing.set_defaults(run=_list)
    doctor = commands.add_parser("doctor", help="driver, devices, launcher and kernel wheels")
    doctor.set_defaults(run=_doctor)
    require = commands.add_parser("require", help="fail unless the variants of a profile are installed and intact")
    require.add_argument("profile", help="a profile that the wheels were built from, a pattern, or a file with one pattern a line")
    require.add_argument("--arch", help="only variants of this arch count")
    require.set_defaults(run=_require)
    for command in (listing, doctor, require):
        command.add_argument("--json", action="store_true", help="one JSON object a line")
    arguments = parser.parse_args(argv)
    try:
        return int(arguments.run(arguments))
    except TkbuildError as exc:
        sys.stderr.write(f"error: {exc}\n")
        return exc.exit_code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

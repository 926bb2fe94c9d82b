"""Run launcher cases, each in a fork of this process, and print their results as JSON: ``{name: "" or traceback}``."""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path

import cases
import tvm_ffi
from fake_driver import FakeDriver


def run_forked(body: Callable[[], None]) -> str:
    """Return what went wrong in ``body``, run in a child; a crash is told by its exit status."""
    with tempfile.TemporaryFile(mode="w+") as report:
        pid = os.fork()
        if pid == 0:
            status = 0
            try:
                body()
            except BaseException:
                report.write(traceback.format_exc())
                status = 1
            report.flush()
            os._exit(status)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        report.seek(0)
        return report.read() or ("" if status == 0 else f"the case ended with status {status}")


def bodies(driver: str, folder: Path, library: Path) -> dict[str, Callable[[], None]]:
    """Return the cases that run with the given kind of driver."""
    cases.register_errors()
    launcher = tvm_ffi.load_module(str(library))
    if driver == "missing":
        return {"missing_driver": lambda: cases.missing_driver_case(launcher)}
    if driver == "old":
        return {"old_driver": lambda: cases.old_driver_case(launcher)}
    world = cases.World(launcher, FakeDriver(folder))
    found = {name[5:]: case for name, case in vars(cases).items() if name.startswith("case_")}
    return {name: partial(case, world) for name, case in found.items()}


def main() -> None:
    """Read the options, run, print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--driver", choices=["fake", "missing", "old"], required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--library", type=Path, required=True)
    options = parser.parse_args()
    found = bodies(options.driver, options.folder, options.library)
    json.dump({name: run_forked(body) for name, body in found.items()}, sys.stdout)


if __name__ == "__main__":
    main()

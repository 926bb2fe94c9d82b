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
from typing import Any

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


def run_case(case: Callable[..., None], launcher: Any, folder: Path) -> None:
    """Run one case, with the stand-in driver loaded unless the case brings another.

    The launcher finds the stand-in because a library of the name libcuda.so.1 is in the process already.
    """
    if case in cases.WITHOUT_WORLD:
        case(launcher, folder)
    else:
        case(cases.World(launcher, FakeDriver(folder / "fake")))


def main() -> None:
    """Read the options, run, print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True, help="holds fake/, old/ and missing/")
    parser.add_argument("--library", type=Path, required=True, help="the launcher")
    options = parser.parse_args()
    cases.register_errors()
    launcher = tvm_ffi.load_module(str(options.library))
    found = {name.removeprefix("case_"): case for name, case in vars(cases).items() if name.startswith("case_")}
    run = {name: run_forked(partial(run_case, case, launcher, options.folder)) for name, case in found.items()}
    json.dump(run, sys.stdout)


if __name__ == "__main__":
    main()

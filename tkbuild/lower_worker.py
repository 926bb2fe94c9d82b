"""A process that imports TileLang once and lowers each kernel in a forked child: no kernel can see another one's traces.

Run as ``python -m tkbuild.lower_worker``; forking.py describes what it reads and answers. A job's folder holds
``request.json``; its child leaves ``kernel.cu`` and ``launch_facts.json`` there, or ``error.json``, and always ``log``.
"""

from __future__ import annotations

import ctypes
import json
import os
import selectors
import signal
import sys
import traceback
from pathlib import Path

from tkbuild.errors import TkbuildError
from tkbuild.forking import ENDED, READY, STARTED
from tkbuild.lower import lower

_PR_SET_PDEATHSIG = 1
_FAILED, _CRASHED = 1, 2


def lower_job(folder: Path) -> int:
    """Lower what ``request.json`` in ``folder`` asks for, write the result there, and return the exit status."""
    request = json.loads((folder / "request.json").read_text())
    import_dir = folder / "sources"
    try:
        lowered = lower(
            request["source"],
            arch=request["arch"],
            pass_configs=request["pass_configs"],
            import_dir=import_dir if import_dir.is_dir() else None,
        )
    except TkbuildError as exc:
        (folder / "error.json").write_text(json.dumps({"message": exc.message}))
        return _FAILED
    (folder / "kernel.cu").write_text(lowered.cuda_source)
    (folder / "launch_facts.json").write_text(json.dumps(lowered.launch_facts))
    return 0


def _run_child(folder: Path) -> None:
    """Become the leader of a process group, lower, and end without running the parent's exit handlers."""
    status = _CRASHED
    try:
        os.setpgid(0, 0)
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        log = os.open(folder / "log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        nothing = os.open(os.devnull, os.O_RDONLY)
        for source, standard in ((nothing, 0), (log, 1), (log, 2)):
            os.dup2(source, standard)
        status = lower_job(folder)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _answer(*words: object) -> None:
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


def _report_ended() -> None:
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        _answer(ENDED, pid, status)


#: Lowered once before the first fork, so that no child pays for what TileLang sets up at first use. The same for every
#: build: what a child inherits does not depend on the kernels.
WARM_UP = """
import tilelang.language as T
M, N, ld = T.dynamic("M"), T.dynamic("N"), T.dynamic("ld", "int64")
@T.prim_func
def kernel(x: T.StridedTensor((M, N), (ld, 1), "bfloat16"), out: T.Tensor((M, N), "float32"), scale: T.float32):
    with T.Kernel(T.ceildiv(N, 1024), M, threads=128) as (bx, by):
        T.assume(ld % 8 == 0)
        values = T.alloc_fragment((1024,), "float32")
        for i in T.Parallel(1024):
            if bx * 1024 + i < N:
                values[i] = x[by, bx * 1024 + i]
        for i in T.Parallel(1024):
            if bx * 1024 + i < N:
                out[by, bx * 1024 + i] = values[i] * scale
"""
_WARM_UP_ARCH = "sm_90a"


def _lower_quietly(source: str) -> None:
    """Lower with what is printed going to stderr: stdout carries answers, and a buffer would be printed again by every child."""
    answers = os.dup(1)
    os.dup2(2, 1)
    try:
        lower(source, arch=_WARM_UP_ARCH, pass_configs={})
        sys.stdout.flush()
    finally:
        os.dup2(answers, 1)
        os.close(answers)


def serve(warm_up: str = WARM_UP) -> None:
    """Lower ``warm_up``, then take jobs from stdin until it ends."""
    _lower_quietly(warm_up)
    wake_read, wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    selector = selectors.DefaultSelector()
    selector.register(0, selectors.EVENT_READ)
    selector.register(wake_read, selectors.EVENT_READ)
    _answer(READY)
    pending = b""
    while True:
        ready = {key.fd for key, _ in selector.select()}
        if wake_read in ready:
            os.read(wake_read, 4096)
            _report_ended()
        if 0 not in ready:
            continue
        chunk = os.read(0, 65536)
        if not chunk:
            return
        *lines, pending = (pending + chunk).split(b"\n")
        for line in lines:
            pid = os.fork()
            if pid == 0:
                _run_child(Path(os.fsdecode(line)))
            _answer(STARTED, pid)


if __name__ == "__main__":
    serve()

"""Lower kernels in worker processes: start them, hand them jobs, limit their time, read what they leave."""

from __future__ import annotations

import contextlib
import json
import sys
import threading
from itertools import count
from pathlib import Path

from tkbuild.errors import LowerError
from tkbuild.forking import ForkClient, ServerEndedError, start_server
from tkbuild.plan import BuildRequest
from tkbuild.toolchain import ProcessGroups, clean_environment
from tkbuild.workfolder import full_disk_told, step_folder

#: What the interpreter runs to lower kernels.
LOWER_WORKER = ("-m", "tkbuild.lower_worker")
_IMPORT_TIMEOUT_S = 300.0
_LOG_NAME = "lower-worker.log"
_TOLD_CHARS = 2000


class Lowerer:
    """Lowers kernels; its processes start when the first kernel needs them. Threads may share it.

    folder: private, removed by the caller.
    """

    def __init__(self, folder: Path, groups: ProcessGroups) -> None:
        self._folder, self._numbers = folder, count()
        self._shared, self._alone = _Worker(folder, groups), _Worker(folder, groups)
        self._retrying = threading.Lock()

    def lower(self, request: BuildRequest, timeout_s: float) -> dict[str, bytes]:
        """Return the files of a lowered kernel and ``log``; a second try if the worker ends under it.

        Raises: LowerError, StepTimeoutError, WorkFolderError.
        """
        with full_disk_told(self._folder):
            with contextlib.suppress(ServerEndedError):
                return self._lower_with(self._shared, request, timeout_s)
            # One at a time: a kernel that ends its worker again takes no other one with it.
            with self._retrying:
                try:
                    return self._lower_with(self._alone, request, timeout_s)
                except ServerEndedError as exc:
                    raise LowerError(f"the process that lowers kernels failed twice: {exc}\n{self._worker_log()}") from exc

    def _lower_with(self, worker: _Worker, request: BuildRequest, timeout_s: float) -> dict[str, bytes]:
        with step_folder(self._folder, f"lower-{next(self._numbers)}") as folder:
            write_job(folder, request)
            return read_result(folder, worker.run(folder, timeout_s), request.variant)

    def _worker_log(self) -> str:
        return _end_of(_read_if_there(self._folder / _LOG_NAME))

    def close(self) -> None:
        """End the processes."""
        self._shared.close()
        self._alone.close()


class _Worker:
    """A process that lowers kernels, started when it is needed and anew after it has ended. Threads may share it."""

    def __init__(self, folder: Path, groups: ProcessGroups) -> None:
        self._folder, self._groups, self._lock = folder, groups, threading.Lock()
        self._client: ForkClient | None = None
        self._failure: ServerEndedError | None = None

    def run(self, folder: Path, timeout_s: float) -> int:
        """Run the job in ``folder`` and return its exit status. Raises: ServerEndedError, StepTimeoutError."""
        client = self._started()
        try:
            return client.run(folder, timeout_s, "lowering")
        except ServerEndedError:
            self._give_up(client)
            raise

    def _started(self) -> ForkClient:
        with self._lock:
            if self._failure is not None:  # what cannot start need not be waited for by every kernel
                raise self._failure
            if self._client is None:
                try:
                    self._client = start_worker(self._folder, self._groups)
                except ServerEndedError as exc:
                    self._failure = exc
                    raise
            return self._client

    def _give_up(self, client: ForkClient) -> None:
        with self._lock:
            if self._client is not client:  # another thread was faster
                return
            self._client = None
        client.close()

    def close(self) -> None:
        """End the process."""
        if self._client is not None:
            self._client.close()


def start_worker(folder: Path, groups: ProcessGroups) -> ForkClient:
    """Start the process that lowers kernels and wait until it has imported TileLang. Raises: ServerEndedError."""
    package_root = str(Path(__file__).resolve().parent.parent)
    env = {**clean_environment(temp_dir=folder), "PYTHONHASHSEED": "0", "PYTHONDONTWRITEBYTECODE": "1", "HOME": str(folder)}
    env |= {"PYTHONPATH": package_root, "CUDA_VISIBLE_DEVICES": "", "TILELANG_CACHE_DIR": str(folder / "tilelang-cache")}
    process = start_server(groups, [sys.executable, *LOWER_WORKER], folder, env, folder / _LOG_NAME)
    return ForkClient(process, groups, ready_timeout_s=_IMPORT_TIMEOUT_S)


def write_job(folder: Path, request: BuildRequest) -> None:
    """Write a job for lower_worker.py, with the files that the source declared, which alone of what it may import are in the key."""
    (folder / "sources").mkdir()
    for name, content in request.sources.items():
        (folder / "sources" / name).write_bytes(content)
    job = {"source": request.source, "arch": str(request.arch), "pass_configs": dict(request.pass_configs)}
    (folder / "request.json").write_text(json.dumps(job))


def read_result(folder: Path, status: int, variant: str) -> dict[str, bytes]:
    """Return what a job for ``variant`` left, and its log. Raises: LowerError with the reason, or with the end of the log of a crash."""
    log = _read_if_there(folder / "log")
    tail = _end_of(log)
    if status != 0:
        reason = f"lowering ended with status {status}; the end of its output:\n{tail}"
        with contextlib.suppress(OSError, ValueError, LookupError, TypeError):  # none, or half of one: the disk was full
            reason = json.loads((folder / "error.json").read_text())["message"].replace("explain VARIANT", f"explain {variant}")
        raise LowerError(reason, status=status, log=tail)
    try:
        facts, source = json.loads((folder / "launch_facts.json").read_bytes()), (folder / "kernel.cu").read_bytes()
    except (OSError, ValueError) as exc:
        raise LowerError(
            "lowering ended with status 0 but left no result; the template must not end its process; "
            f"the end of its output:\n{tail}",
            status=status,
            log=tail,
        ) from exc
    plan = json.dumps(facts, sort_keys=True, indent=1).encode() + b"\n"
    return {"kernel.cu": source, "plan.json": plan, "log": log}


def _read_if_there(path: Path) -> bytes:
    return path.read_bytes() if path.exists() else b""


def _end_of(log: bytes) -> str:
    return log.decode(errors="replace")[-_TOLD_CHARS:]

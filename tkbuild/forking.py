"""Talk to a server that forks itself for each job: headers parsed once, TileLang imported once, a fresh child every time.

The protocol is the same for forkserver.c and lower_worker.py. In: one folder a line. Out: ``ready``, then for each job
``pid P`` when its child starts and ``done P STATUS`` when it ends. A child writes its results and ``log`` to its folder.
"""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from tkbuild.errors import StepTimeoutError
from tkbuild.toolchain import ProcessGroups

READY, STARTED, ENDED = "ready", "pid", "done"
_ANSWER_TIMEOUT_S = 60.0


class ServerEndedError(Exception):
    """The server ended, or did not get ready or answer in time."""


def start_server(
    groups: ProcessGroups, command: Sequence[str | Path], folder: Path, env: Mapping[str, str], log: Path
) -> subprocess.Popen[str]:
    """Start a forking server in ``folder`` with text pipes as stdin and stdout; what it says goes to the end of ``log``."""
    with log.open("ab") as messages:
        return groups.start(
            command,
            cwd=folder,
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=messages,
            text=True,
            bufsize=1,
        )


@dataclass
class _Child:
    pid: int
    ended: threading.Event = field(default_factory=threading.Event)
    status: int | None = None


class ForkClient:
    """The driver's end of a forking server. Threads may run jobs at the same time.

    process: started by ``groups`` with text pipes as stdin and stdout.  Raises: ServerEndedError if it does not get ready.
    """

    def __init__(self, process: subprocess.Popen[str], groups: ProcessGroups, *, ready_timeout_s: float) -> None:
        self._process, self._groups = process, groups
        self._sending = threading.Lock()
        self._changed = threading.Condition()
        self._children: dict[int, _Child] = {}
        self._started_pid: int | None = None
        self._is_ready = self._has_ended = False
        self._reader = threading.Thread(target=self._read_answers, daemon=True)
        self._reader.start()
        try:
            self._wait_for(lambda: self._is_ready, ready_timeout_s)
        except ServerEndedError:
            self.close()
            raise

    def _read_answers(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as answers:
            for line in answers:
                self._take_answer(*line.split())
        with self._changed:
            self._has_ended = True
            for child in self._children.values():
                child.ended.set()
            self._changed.notify_all()

    def _take_answer(self, word: str = "", *numbers: str) -> None:
        with self._changed:
            if word == READY:
                self._is_ready = True
            elif word in (STARTED, ENDED):
                pid = int(numbers[0])
                # A child may end before the answer that it was started.
                child = self._children.setdefault(pid, _Child(pid))
                if word == STARTED:
                    self._started_pid = pid
                else:
                    child.status = int(numbers[1])
                    child.ended.set()
            self._changed.notify_all()

    def _wait_for(self, condition: Callable[[], bool], timeout_s: float) -> None:
        with self._changed:
            self._changed.wait_for(lambda: condition() or self._has_ended, timeout_s)
            if not condition():
                raise ServerEndedError(
                    "the server has ended" if self._has_ended else f"the server did not answer within {timeout_s:g} s"
                )

    def run(self, folder: Path, timeout_s: float, what: str) -> int:
        """Run one job in ``folder`` and return its exit status (negative: the signal that ended it).

        what: names the step in the message of StepTimeoutError.  Raises: StepTimeoutError, ServerEndedError.
        """
        child = self._start_child(folder)
        try:
            if not child.ended.wait(timeout_s):
                _kill(child.pid)
                child.ended.wait(_ANSWER_TIMEOUT_S)
                raise StepTimeoutError(
                    f"{what} was stopped after {timeout_s:g} s; give it longer with --timeout", elapsed_s=timeout_s
                )
        finally:
            with self._changed:
                self._children.pop(child.pid, None)  # a later child may get the same pid
        if child.status is None:
            raise ServerEndedError("the server has ended")
        return os.waitstatus_to_exitcode(child.status)

    def _start_child(self, folder: Path) -> _Child:
        with self._sending:
            self._started_pid = None
            try:
                assert self._process.stdin is not None
                self._process.stdin.write(f"{folder}\n")
            except (OSError, ValueError) as exc:
                raise ServerEndedError("the server has ended") from exc
            self._wait_for(lambda: self._started_pid is not None, _ANSWER_TIMEOUT_S)
            with self._changed:
                assert self._started_pid is not None
                return self._children[self._started_pid]

    def close(self) -> None:
        """End the server; children that still run end with it."""
        with suppress(OSError):
            if self._process.stdin is not None:
                self._process.stdin.close()
        self._groups.end(self._process)
        self._reader.join(_ANSWER_TIMEOUT_S)


def _kill(pid: int) -> None:
    for end in (os.killpg, os.kill):  # the child may not have its own group yet
        with suppress(ProcessLookupError, PermissionError):
            end(pid, signal.SIGKILL)

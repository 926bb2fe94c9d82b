"""Folders for temporary files: private, gone afterwards, even those of killed processes; a failure for want of room says so."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tkbuild.digest import bytes_digest
from tkbuild.errors import StepTimeoutError, TkbuildError, WorkFolderError

# A compiler that runs out of room may remove what it had written, so "full" is less than one kernel's files may need.
LEAST_FREE_BYTES = 16 << 20
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
_NO_ROOM_TEXTS = tuple(map(os.strerror, _NO_ROOM))
_ADVICE = "make room there, or name a folder on another disk in TMPDIR"


@contextlib.contextmanager
def work_folder(parent: Path | None = None) -> Iterator[Path]:
    """Give a private folder in ``parent`` (default: where TMPDIR says). Raises: WorkFolderError if it cannot be made."""
    parent = parent or temp_dir()
    try:
        with full_disk_told(parent):
            folder = private_folder(parent, "tkbuild-")
    except OSError as exc:
        raise WorkFolderError(f"cannot make a folder in {parent}: {exc.strerror}; {_ADVICE}", folder=str(parent)) from exc
    with folder as name:
        yield Path(name)


def private_folder(parent: Path, prefix: str) -> tempfile.TemporaryDirectory[str]:
    """Return a new folder in ``parent`` that goes with its block. What ended processes left there under ``prefix`` goes now.

    Raises: OSError if it cannot be made.
    """
    for path in parent.glob(f"{prefix}*"):
        with contextlib.suppress(FileNotFoundError):
            if path.lstat().st_uid == os.geteuid() and owner_has_ended(path.name.removeprefix(prefix)):
                shutil.rmtree(path, ignore_errors=True)
    return tempfile.TemporaryDirectory(prefix=f"{prefix}{this_owner()}-", dir=parent)


def this_owner() -> str:
    """Name this process so that others can tell whether it lives: a pid means something in one pid namespace of one boot."""
    return f"{_process_space()}-{os.getpid()}-{_start_time(os.getpid())}"


def owner_has_ended(name: str) -> bool | None:
    """Whether the process has ended whose ``this_owner()`` a name begins with; None where that cannot be told, as of another host."""
    space, _, rest = name.partition("-")
    pid, _, rest = rest.partition("-")
    if space != _process_space() or not pid.isdecimal():
        return None
    return _start_time(int(pid)) != rest.partition("-")[0]


def _process_space() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return bytes_digest(f"{boot} {Path('/proc/self/ns/pid').readlink()}".encode())[:16]
    except OSError:
        return bytes_digest(socket.gethostname().encode())[:16]


def _start_time(pid: int) -> str:
    """Ticks after boot at which a process started: field 22 of its stat; tells a process from a later one of the same pid."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return "0"


def temp_dir() -> Path:
    """Return the folder for temporary files that TMPDIR and Python choose. Raises: WorkFolderError if none can be written."""
    try:
        return Path(tempfile.gettempdir())
    except OSError as exc:
        raise WorkFolderError(f"{exc.strerror}; {_ADVICE}") from exc


@contextlib.contextmanager
def step_folder(parent: Path, name: str) -> Iterator[Path]:
    """Give one step the new folder ``name`` in ``parent``. Raises: WorkFolderError in place of what a full disk caused."""
    folder = parent / name
    try:
        with full_disk_told(parent):
            folder.mkdir()
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def full_disk_told(folder: Path) -> Iterator[None]:
    """Raise WorkFolderError in place of an error within the block if too little room is left on the disk of ``folder``.

    Its facts are ``folder`` and ``free_bytes``; its text repeats what failed.
    """
    try:
        yield
    except (WorkFolderError, StepTimeoutError):
        raise
    except (OSError, TkbuildError) as exc:
        free_bytes = _free_bytes(folder)
        if free_bytes >= LEAST_FREE_BYTES and not _names_lack_of_room(exc):
            raise
        raise WorkFolderError(
            f"too little room is left on the disk of {folder}: {free_bytes} bytes free; {_ADVICE}; what failed: {exc}",
            folder=str(folder),
            free_bytes=free_bytes,
        ) from exc


def _free_bytes(folder: Path) -> int:
    while not folder.exists():  # someone cleans up while we work
        folder = folder.parent
    return shutil.disk_usage(folder).free


def _names_lack_of_room(exc: OSError | TkbuildError) -> bool:
    """Whether the operating system, or a tool in its words, said so: a disk can also lack inodes, or a user quota."""
    return getattr(exc, "errno", None) in _NO_ROOM or any(text in str(exc) for text in _NO_ROOM_TEXTS)

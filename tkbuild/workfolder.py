"""Folders for temporary files: private, gone afterwards, and a failure for want of room says so."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

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
            folder = tempfile.TemporaryDirectory(prefix="tkbuild-", dir=parent)
    except OSError as exc:
        raise WorkFolderError(f"cannot make a folder in {parent}: {exc.strerror}; {_ADVICE}", folder=str(parent)) from exc
    with folder as name:
        yield Path(name)


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

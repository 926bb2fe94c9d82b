"""Temporary folders: private and gone afterwards, and a full disk is told as such."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from fake_build import full_disk

from tkbuild.errors import CompileError, LowerError, StepTimeoutError, WorkFolderError
from tkbuild.workfolder import full_disk_told, step_folder, work_folder


def test_folders_are_gone_afterwards(tmp_path: Path) -> None:
    with work_folder(tmp_path) as work, step_folder(work, "one") as folder:
        (folder / "file").touch()
        assert folder == work / "one"
    assert list(tmp_path.iterdir()) == []


def test_folders_of_killed_processes_go_with_the_next(tmp_path: Path) -> None:
    code = f"""
import os
from pathlib import Path
from tkbuild.workfolder import work_folder
with work_folder(Path({str(tmp_path)!r})):
    os.kill(os.getpid(), 9)
"""
    subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parent.parent, check=False)
    (left,) = tmp_path.iterdir()
    (left / "kernel-1").mkdir()
    kept = [tmp_path / "tkbuild-mine", tmp_path / f"tkbuild-0123456789abcdef-{2**30}-1-x"]
    for path in kept:
        path.mkdir()
    with work_folder(tmp_path) as living, work_folder(tmp_path) as other:
        assert sorted(tmp_path.iterdir()) == sorted([*kept, living, other])


@pytest.mark.parametrize("error", [LowerError("it crashed"), CompileError("it died"), OSError(errno.EIO, "Input/output error")])
def test_failure_on_a_full_disk_names_folder_and_free_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    full_disk(monkeypatch, free_bytes=4096)
    told = r"4096 bytes free; make room there, or name a folder .* TMPDIR"
    with pytest.raises(WorkFolderError, match=told) as caught, step_folder(tmp_path, "one"):
        raise error
    assert (caught.value.folder, caught.value.free_bytes) == (str(tmp_path), 4096)
    assert str(tmp_path) in str(caught.value)
    assert str(caught.value).endswith(f"what failed: {error}")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)),  # no inodes, say
        OSError(errno.EDQUOT, os.strerror(errno.EDQUOT)),
        CompileError("fatal error: error writing to kernel.ii: No space left on device"),
    ],
)
def test_lack_of_room_that_is_no_lack_of_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    full_disk(monkeypatch, free_bytes=1 << 40)
    with pytest.raises(WorkFolderError, match=f"too little room is left on the disk of {tmp_path}"), full_disk_told(tmp_path):
        raise error


@pytest.mark.parametrize(
    ("free_bytes", "error"),
    [
        (1 << 40, LowerError("it crashed")),
        (1 << 40, OSError(errno.EIO, "broken")),
        (0, StepTimeoutError("slow")),
        (0, KeyError("a")),
    ],
)
def test_other_failures_stay_what_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free_bytes: int, error: Exception
) -> None:
    full_disk(monkeypatch, free_bytes)
    with pytest.raises(type(error)) as caught, full_disk_told(tmp_path):
        raise error
    assert caught.value is error


def test_full_disk_is_told_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full_disk(monkeypatch, free_bytes=0)
    with pytest.raises(WorkFolderError) as caught, full_disk_told(tmp_path), step_folder(tmp_path, "one"):
        raise LowerError("it crashed")
    assert str(caught.value).count("too little room") == 1


def test_folder_that_someone_else_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(WorkFolderError, match="too little room"), full_disk_told(tmp_path / "gone/deeper"):
        full_disk(monkeypatch, free_bytes=0)
        raise LowerError("it crashed")


@pytest.mark.parametrize(
    ("number", "telling"), [(errno.ENOSPC, "too little room is left on the disk of"), (errno.EACCES, "cannot make a folder in")]
)
def test_work_folder_that_cannot_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, telling: str) -> None:
    def refuse(*_args: object, **_options: object) -> None:
        raise OSError(number, os.strerror(number), str(tmp_path))

    monkeypatch.setattr(tempfile, "TemporaryDirectory", refuse)
    with pytest.raises(WorkFolderError, match=f"{telling} {tmp_path}.*TMPDIR"), work_folder(tmp_path):
        pass


def test_no_usable_folder_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> str:
        raise FileNotFoundError(errno.ENOENT, "No usable temporary directory found in ['/tmp', '/']")

    monkeypatch.setattr(tempfile, "gettempdir", refuse)
    with pytest.raises(WorkFolderError, match=r"No usable temporary directory found in \['/tmp', '/'\]; make room"), work_folder():
        pass

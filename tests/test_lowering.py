"""Lowering in workers: what a source may import, and what happens when a template or a worker ends."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from fake_build import Builder, request, use_fake_worker

from tkbuild import lowering
from tkbuild.errors import LowerError, StepTimeoutError
from tkbuild.forking import ForkClient
from tkbuild.plan import BuildRequest
from tkbuild.toolchain import ProcessGroups


@pytest.fixture
def builder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Builder:
    use_fake_worker(monkeypatch)
    return Builder(tmp_path)


def test_sources_are_importable_and_nothing_else_is(builder: Builder) -> None:
    good = request("a", "import helper_module\n", sources={"helper_module.py": b"TEXT = '// from helper'\n"})
    result = builder(good, request("b", "import helper_module \n"))
    assert [built.variant for built in result.built] == ["t.k-a-sm_90a"]
    assert b"from helper" in result.built[0].cubin
    assert "No module named 'helper_module'" in result.failures[0].error.message


def test_template_that_ends_its_process_fails_alone(builder: Builder) -> None:
    builder_result = builder(
        request("gone", "import os_exit\n", sources={"os_exit.py": b"import os\nos._exit(0)\n"}), request("good")
    )
    assert [built.variant for built in builder_result.built] == ["t.k-good-sm_90a"]
    (failure,) = builder_result.failures
    assert (failure.variant, failure.stage, type(failure.error)) == ("t.k-gone-sm_90a", "lower", LowerError)
    assert "left no result" in failure.error.message


def test_errors_name_the_variant_whose_source_is_to_be_shown(tmp_path: Path) -> None:
    (tmp_path / "error.json").write_text('{"message": "`tkbuild explain VARIANT --source` shows it"}')
    with pytest.raises(LowerError, match=r"^`tkbuild explain t\.k-a-sm_90a --source` shows it$"):
        lowering.read_result(tmp_path, 1, "t.k-a-sm_90a")


def killer(name: str, marker: Path | None = None) -> BuildRequest:
    """A request whose template kills the server that lowers it; with a marker, only if that is not there yet."""
    code = "import os, pathlib, signal, time\nTEXT = ''\n"
    if marker is not None:
        code += f"marker = pathlib.Path({str(marker)!r})\nif not marker.exists():\n    marker.touch()\n    "
        code += "os.kill(os.getppid(), signal.SIGKILL); time.sleep(60)\n"
    else:
        code += "os.kill(os.getppid(), signal.SIGKILL); time.sleep(60)\n"
    return request(name, f"import kill_{name}\n", sources={f"kill_{name}.py": code.encode()})


def test_lowering_server_that_dies_once_fails_nothing(builder: Builder, tmp_path: Path) -> None:
    result = builder(request("a"), killer("once", tmp_path / "marker"), *(request(str(i)) for i in range(4)))
    assert (tmp_path / "marker").exists()
    assert result.failures == ()
    assert len(result.built) == 6


def test_kernel_that_always_ends_the_server_fails_alone(builder: Builder) -> None:
    result = builder(request("a"), killer("x"), request("b"), killer("y"), request("c"))
    assert sorted(failure.variant for failure in result.failures) == ["t.k-x-sm_90a", "t.k-y-sm_90a"]
    assert all("failed twice" in failure.error.message for failure in result.failures)
    assert len(result.built) == 3


def test_server_that_cannot_start_is_tried_twice(builder: Builder, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    starts = tmp_path / "starts"
    monkeypatch.setattr(lowering, "LOWER_WORKER", ("-c", f"open({str(starts)!r}, 'a').write('x'); raise SystemExit('no TileLang')"))
    result = builder(*(request(str(i)) for i in range(5)))
    assert len(result.failures) == 5
    assert "no TileLang" in result.failures[0].error.message
    assert starts.read_text() == "xx"


def test_pid_of_a_stopped_job_may_come_again() -> None:
    pid = 2**22 + 1  # no process can have it
    server = f"""
import time
print("ready", flush=True)
for status in (9, 0):
    input()
    print("pid {pid}", flush=True)
    time.sleep(0.5)
    print("done {pid}", status, flush=True)
input()
"""
    groups, pipe = ProcessGroups(), subprocess.PIPE
    process = groups.start([sys.executable, "-c", server], stdin=pipe, stdout=pipe, text=True, bufsize=1)
    client = ForkClient(process, groups, ready_timeout_s=30)
    with pytest.raises(StepTimeoutError, match=r"slow was stopped after 0\.1 s"):
        client.run(Path("/a"), 0.1, "slow")
    assert client.run(Path("/b"), 30, "next") == 0
    client.close()

"""Building: what is run and what is not, failures, interruption, and that nothing depends on order or place."""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import click
import pytest
from click.testing import CliRunner
from fake_build import FACTS, SIGNATURE, SM_100A, TILELANG, Builder, full_disk, request, use_fake_worker
from fake_toolkit import FakeToolkit

from tkbuild.build import BuildEvent, BuildOptions, build
from tkbuild.cli.build import clean_command, gc_command
from tkbuild.cli.compile import compile_command
from tkbuild.errors import (
    ArgumentError,
    CompileError,
    LowerError,
    StepTimeoutError,
    StoreError,
    TkbuildError,
    ToolchainError,
    WorkFolderError,
)
from tkbuild.expr import Expr
from tkbuild.flags import compile_flags
from tkbuild.plan import BuildRequest, make_plan
from tkbuild.signature import ArgSpec, DtypeRule
from tkbuild.store import Store
from tkbuild.toolchain import find, find_tilelang

ROOT = Path(__file__).parent.parent


@pytest.fixture
def builder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Builder:
    use_fake_worker(monkeypatch)
    return Builder(tmp_path)


# ---- what is run


def test_second_build_runs_nothing(builder: Builder, monkeypatch: pytest.MonkeyPatch) -> None:
    requests = [request("a"), request("b"), request("a", arch=SM_100A)]
    first = builder(*requests)
    assert (first.hits, first.lowered, first.compiled, first.failures) == (0, 3, 3, ())
    assert [built.variant for built in first.built] == ["t.k-a-sm_90a", "t.k-b-sm_90a", "t.k-a-sm_100a"]
    assert builder.events[-1].kind == "done"
    assert (builder.events[-1].finished, builder.events[-1].total) == (3, 3)
    assert sorted(builder.kinds()) == ["compiled"] * 3 + ["done"] + ["lowered"] * 3 + ["started"] * 3
    calls = builder.kit.calls("ptxas")

    def refuse(*_args: object, **_options: object) -> None:
        raise AssertionError("a process was started")

    toolchain = builder.kit.toolchain()
    monkeypatch.setattr(subprocess, "Popen", refuse)
    events: list[BuildEvent] = []
    second = build(make_plan(requests, FACTS), builder.store, toolchain, TILELANG, BuildOptions(), events.append)
    assert (second.hits, second.lowered, second.compiled) == (3, 0, 0)
    assert [event.kind for event in events] == ["hit"] * 3 + ["done"]
    assert second.built == first.built
    assert builder.kit.calls("ptxas") == calls == 3
    json.dumps([event.to_json() for event in events])


def test_built_variant_has_its_plan_and_resources(builder: Builder) -> None:
    (built,) = builder(request("a", programmatic="on")).built
    assert built.plan["variant"] == "t.k-a-sm_90a"
    assert built.plan["launches"][0]["grid"] == ["T", 1, 1]
    assert built.resources == {"kernel_kernel": {"registers": 40, "spill_bytes": 0, "stack_bytes": 0, "static_smem_bytes": 1024}}
    assert b"# a" in built.cubin
    lowered = builder.store.get("lowered", built.lower_key)
    assert lowered is not None
    assert lowered.facts == {"variants": ["t.k-a-sm_90a"], "log": "lowering for sm_90a\n"}, "what TileLang prints is kept"


def test_equal_work_is_done_once(builder: Builder) -> None:
    twins = [request("a", "same\n"), request("b", "same\n"), request("c", "same\n", extra_flags=("-DX",))]
    result = builder(*twins)
    assert (len(result.built), result.lowered, result.compiled) == (3, 1, 2)
    assert builder.kit.calls("ptxas") == 2
    # Another source that is lowered to the same CUDA text.
    again = builder(request("d", "same\n", pass_configs={"tl.x": 1}))
    assert (again.lowered, again.compiled, again.hits) == (1, 0, 1)
    assert sorted(builder.kinds()) == ["done", "hit", "lowered", "started"]


def test_only_what_changed_is_built(builder: Builder) -> None:
    builder(request("a"), request("b"))
    result = builder(request("a"), request("b", "changed\n"))
    assert (result.hits, result.lowered, result.compiled) == (1, 1, 1)
    recompiled = builder(request("a"), facts=replace(FACTS, compiling={"cuda": "newer"}))
    assert (recompiled.lowered, recompiled.compiled) == (0, 1)


def test_damaged_artifact_is_built_again(builder: Builder) -> None:
    (first,) = builder(request("a")).built
    cubin = next((builder.store.root / "cubins").rglob("kernel.cubin"))
    cubin.write_bytes(b"\x7fELF")
    with pytest.warns(UserWarning, match="is damaged"):
        (second,) = builder(request("a")).built
    assert second == first


# ---- failures


def test_failures_do_not_stop_the_others(builder: Builder) -> None:
    result = builder(request("bad", "fail\n"), request("dead", "crash\n"), request("good"))
    assert [built.variant for built in result.built] == ["t.k-good-sm_90a"]
    failures = {failure.variant: failure for failure in result.failures}
    assert failures["t.k-bad-sm_90a"].stage == "lower"
    assert isinstance(failures["t.k-bad-sm_90a"].error, LowerError)
    assert failures["t.k-bad-sm_90a"].error.message == "the template is wrong"
    assert f"status {-signal.SIGABRT}" in failures["t.k-dead-sm_90a"].error.message
    assert "lower, after" in next(event.message for event in builder.events if event.kind == "failed")


@pytest.mark.parametrize("mode", ["empty", "half", "fail", "other_arch", "nothing"])
def test_failed_compile_leaves_no_entry(builder: Builder, mode: str) -> None:
    builder.kit.set_mode(mode)
    result = builder(request("a"))
    assert isinstance(result.failures[0].error, CompileError)
    assert result.failures[0].stage == "compile"
    assert list(builder.store.entries("cubins")) == []
    builder.kit.set_mode("ok")
    result = builder(request("a"))
    assert (result.lowered, result.compiled, result.failures) == (0, 1, ())


def test_time_outs_end_groups_and_build_the_rest(builder: Builder) -> None:
    started = time.monotonic()
    result = builder(request("slow", "hang\n"), *(request(str(i)) for i in range(4)), step_timeout_s=2.0)
    assert time.monotonic() - started < 12
    assert len(result.built) == 4
    (failure,) = result.failures
    assert (failure.variant, failure.stage) == ("t.k-slow-sm_90a", "lower")
    assert isinstance(failure.error, StepTimeoutError)
    assert 2 <= failure.elapsed_s < 8
    builder.kit.set_mode("hang")
    result = builder(request("new"), step_timeout_s=1.0)
    assert (result.failures[0].stage, type(result.failures[0].error)) == ("compile", StepTimeoutError)
    wait_until(lambda: not running("sleep", builder.kit.root), "no process left")


def test_limits_hold_for_stored_results_too(builder: Builder) -> None:
    builder.kit.set_mode("spill")
    loose = builder(request("a", allow={"spill_bytes": 16, "stack_bytes": 16}))
    assert loose.failures == ()
    strict = builder(request("a"))
    assert (strict.compiled, strict.failures[0].stage) == (0, "check")
    assert "kernel_kernel uses 16 spill_bytes, allowed: 0" in strict.failures[0].error.message


def test_unnamed_sizes_are_refused_before_compiling(builder: Builder) -> None:
    signature = replace(SIGNATURE, args=(ArgSpec("x", "inout", DtypeRule("float32"), (Expr("N"),)),))
    result = builder(request("a", signature=signature))
    assert (result.failures[0].stage, builder.kit.calls("ptxas")) == ("launch plan", 0)


def test_full_store_ends_the_build(builder: Builder, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: Store, *_args: object, **_options: object) -> None:
        raise StoreError("No space left on device; make room with `tkbuild gc`")

    monkeypatch.setattr(Store, "put", full)
    with pytest.raises(StoreError, match="No space left"):
        builder(request("a"), request("b"))


def test_full_disk_is_told_where_a_kernel_dies_of_it(builder: Builder, monkeypatch: pytest.MonkeyPatch) -> None:
    full_disk(monkeypatch, free_bytes=4096)
    result = builder(request("dead", "crash\n"), request("good"))
    assert [built.variant for built in result.built] == ["t.k-good-sm_90a"]
    (failure,) = result.failures
    assert (type(failure.error), failure.stage, failure.error.free_bytes) == (WorkFolderError, "lower", 4096)
    assert "what failed: lowering ended with status" in failure.error.message
    builder.kit.set_mode("half")
    (failure,) = builder(request("new")).failures
    assert (type(failure.error), failure.stage) == (WorkFolderError, "compile")
    assert "what failed: the CUDA compiler ended well but its cubin is damaged" in failure.error.message


@pytest.mark.parametrize(("name", "stage"), [("request.json", "lower"), ("kernel.cu", "compile")])
def test_full_disk_is_told_where_we_write(builder: Builder, monkeypatch: pytest.MonkeyPatch, name: str, stage: str) -> None:
    write_text = Path.write_text

    def full(self: Path, text: str) -> int:
        if self.name == name:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self))
        return write_text(self, text)

    monkeypatch.setattr(Path, "write_text", full)
    (failure,) = builder(request("a")).failures
    assert (type(failure.error), failure.stage) == (WorkFolderError, stage)
    assert f"{failure.error.free_bytes} bytes free" in failure.error.message


def test_old_toolkit_is_refused_first(builder: Builder, tmp_path: Path) -> None:
    builder.kit = FakeToolkit.create(tmp_path / "old", release="12.4.1", header=12040)
    with pytest.raises(ToolchainError, match=r"sm_100a needs CUDA 12\.8"):
        builder(request("a", arch=SM_100A))
    assert builder.events == []


# ---- interruption


def running(name: str, where: Path) -> list[int]:
    """Pids of processes called ``name`` whose group was started by a tool below ``where``."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if (path / "comm").read_text().strip() == name and str(where) in (path / "environ").read_text():
                found.append(int(path.name))
        except OSError:
            continue
    return found


INTERRUPTED = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)  # a runner in the background ignores it, and so would we
import sys
sys.path[:0] = [{tests!r}, {root!r}]
from pathlib import Path
from fake_build import FAKE_WORKER, Builder, request
from tkbuild import lowering
lowering.LOWER_WORKER = FAKE_WORKER
builder = Builder(Path({folder!r}))
print(len(builder(request("early")).built), flush=True)
builder.kit.set_mode("hang")
print("hanging", flush=True)
try:
    builder(request("late"), request("later", "hang\\n"))
except KeyboardInterrupt:
    print("interrupted")
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_interrupted_build_leaves_no_process_and_a_usable_store(
    tmp_path: Path, number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = INTERRUPTED.format(tests=str(Path(__file__).parent), root=str(ROOT), folder=str(tmp_path))
    env = {**os.environ, "TMPDIR": str(tmp_path)}
    with (
        subprocess.Popen(
            [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, start_new_session=True, env=env
        ) as process,
        contextlib.ExitStack() as stack,
    ):
        stack.callback(process.kill)
        assert process.stdout is not None
        assert [process.stdout.readline(), process.stdout.readline()] == ["1\n", "hanging\n"]
        wait_until(lambda: len(lower_workers(tmp_path)) == 2, "the worker and the child that hangs")
        started = time.monotonic()
        process.send_signal(number)
        assert process.stdout.read() == "interrupted\n"
        assert process.wait(10) == 0
    assert time.monotonic() - started < 5
    wait_until(lambda: not running("sleep", tmp_path) and not lower_workers(tmp_path), "no process left")
    use_fake_worker(monkeypatch)
    kit = FakeToolkit(tmp_path / "cuda")
    kit.set_mode("ok")
    requests = [request("early"), request("late")]
    result = build(make_plan(requests, FACTS), Store(tmp_path / "artifacts"), kit.toolchain(), TILELANG)
    assert (result.hits, len(result.built)) == (1, 2)
    assert list((tmp_path / "artifacts/tmp").iterdir()) == []
    assert not list(tmp_path.glob("tkbuild-*"))


def lower_workers(where: Path) -> set[int]:
    """Pids of processes that run the fake worker in a folder below ``where``."""
    found = set()
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            is_worker = (path / "cmdline").read_bytes().rstrip(b"\0").endswith(b"fake_lower_worker.py")
            if is_worker and str(where) in (path / "environ").read_text():
                found.add(int(path.name))
    return found


def wait_until(condition: Callable[[], bool], what: str) -> None:
    """Give processes some time to start or to go."""
    for _ in range(1000):
        if condition():
            return
        time.sleep(0.01)
    raise AssertionError(f"did not come about: {what}")


# ---- arguments of the commands


@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf, 1e300])
def test_time_that_is_no_time_to_wait(value: float) -> None:
    with pytest.raises(ArgumentError, match="--timeout"):
        BuildOptions(step_timeout_s=value)


@pytest.mark.parametrize(
    ("command", "arguments", "error"),
    [
        (compile_command, ["--timeout", "nan"], ArgumentError),
        (compile_command, ["--timeout", "0"], ArgumentError),
        (compile_command, ["--shard", "1/" + "9" * 5000], ArgumentError),
        (gc_command, ["--max-bytes", "-1"], ArgumentError),
        (gc_command, ["--older-than-days", "-1"], ArgumentError),
        (gc_command, ["--older-than-days", "nan"], ArgumentError),
        (clean_command, ["--store", __file__], StoreError),
        (clean_command, ["--store", ""], StoreError),
    ],
)
def test_arguments_are_refused_before_anything_starts(
    command: click.Command, arguments: list[str], error: type[TkbuildError], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def refuse(*_args: object, **_options: object) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr(subprocess, "Popen", refuse)
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(command, arguments, standalone_mode=False)
    assert type(result.exception) is error
    if error is ArgumentError:
        assert arguments[0] in str(result.exception)


# ---- the real tools


KERNEL = """
import tilelang.language as T
N = T.dynamic("T")
@T.prim_func
def kernel(x: T.Tensor((N,), "float32")):
    with T.Kernel(T.ceildiv(N, {threads}), threads={threads}) as bx:
        for i in T.Parallel({threads}):
            if bx * {threads} + i < N:
                x[bx * {threads} + i] = x[bx * {threads} + i] + 1
"""


@pytest.mark.toolchain
def test_results_depend_on_neither_order_nor_place_nor_jobs(tmp_path: Path) -> None:
    toolchain, tilelang = find(), find_tilelang()
    requests = [request(str(threads), KERNEL.format(threads=threads)) for threads in (64, 128)]

    def run(
        name: str, plan_of: Callable[[list[BuildRequest]], list[BuildRequest]], **options: object
    ) -> dict[str, tuple[bytes, str]]:
        found: dict[str, tuple[bytes, str]] = {}
        for part in plan_of(requests), requests:
            given = BuildOptions(**options)  # type: ignore[arg-type]
            result = build(make_plan(part, FACTS), Store(tmp_path / name), toolchain, tilelang, given)
            assert result.failures == ()
            found |= {built.variant: (built.cubin, json.dumps(built.plan)) for built in result.built}
        return found

    together = run("a", lambda all_of_them: all_of_them, jobs=2)
    assert run("b/deeper", lambda all_of_them: all_of_them[1:], jobs=1, share_headers=False) == together
    assert len({cubin for cubin, _ in together.values()}) == 2
    assert compile_flags({}, []) == requests[0].flags
    assert os.environ.get("PYTHONHASHSEED") != "0"

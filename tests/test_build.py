"""Building: what is run and what is not, failures, interruption, and that nothing depends on order or place."""

from __future__ import annotations

import contextlib
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
from fake_toolkit import FakeToolkit

from tkbuild import build as build_module
from tkbuild.arch import TargetArch
from tkbuild.build import BuildEvent, BuildOptions, BuildResult, CompileQueue, build, explain, job_count, load_built, needed_keys
from tkbuild.cli.build import clean_command, compile_command, gc_command
from tkbuild.errors import ArgumentError, CompileError, LowerError, StepTimeoutError, StoreError, TkbuildError, ToolchainError
from tkbuild.expr import Expr
from tkbuild.plan import BuildFacts, BuildRequest, make_plan
from tkbuild.signature import ArgSpec, DtypeRule, KernelSignature
from tkbuild.store import Store
from tkbuild.toolchain import TileLangPackage, compile_flags, find, find_tilelang

ROOT = Path(__file__).parent.parent
SM_90A, SM_100A = TargetArch.parse("sm_90a"), TargetArch.parse("sm_100a")
SIGNATURE = KernelSignature("t.k", "", "", "t_k", args=(ArgSpec("x", "inout", DtypeRule("float32"), (Expr("T"),)),))
FACTS = BuildFacts({"tilelang": "fake"}, {"cuda": "fake"})
TILELANG = TileLangPackage("0.1.15", "d", "h", ())


def request(name: str, source: str = "", arch: TargetArch = SM_90A, **changes: object) -> BuildRequest:
    plain = BuildRequest(f"t.k-{name}-{arch}", arch, SIGNATURE, {}, source or f"# {name}\n", {}, {}, (), {"spill_bytes": 0})
    return replace(plain, **changes)  # type: ignore[arg-type]


class Builder:
    """Builds with fake tools in one folder and keeps what was reported."""

    def __init__(self, folder: Path) -> None:
        self.kit = FakeToolkit.create(folder / "cuda")
        self.store = Store(folder / "artifacts")
        self.events: list[BuildEvent] = []

    def __call__(self, *requests: BuildRequest, facts: BuildFacts = FACTS, **options: object) -> BuildResult:
        self.events = []
        given = BuildOptions(**{"jobs": 2, **options})  # type: ignore[arg-type]
        return build(make_plan(requests, facts), self.store, self.kit.toolchain(), TILELANG, given, self.events.append)

    def kinds(self) -> list[str]:
        return [event.kind for event in self.events]


@pytest.fixture
def builder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Builder:
    monkeypatch.setattr(build_module, "LOWER_WORKER", (str(Path(__file__).with_name("fake_lower_worker.py")),))
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


def test_sources_are_importable_and_nothing_else_is(builder: Builder) -> None:
    good = request("a", "import helper_module\n", sources={"helper_module.py": b"TEXT = '// from helper'\n"})
    result = builder(good, request("b", "import helper_module \n"))
    assert [built.variant for built in result.built] == ["t.k-a-sm_90a"]
    assert b"from helper" in result.built[0].cubin
    assert "No module named 'helper_module'" in result.failures[0].error.message


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


def test_template_that_ends_its_process_fails_alone(builder: Builder) -> None:
    builder_result = builder(
        request("gone", "import os_exit\n", sources={"os_exit.py": b"import os\nos._exit(0)\n"}), request("good")
    )
    assert [built.variant for built in builder_result.built] == ["t.k-good-sm_90a"]
    (failure,) = builder_result.failures
    assert (failure.variant, failure.stage, type(failure.error)) == ("t.k-gone-sm_90a", "lower", LowerError)
    assert "left no result" in failure.error.message


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
    monkeypatch.setattr(
        build_module, "LOWER_WORKER", ("-c", f"open({str(starts)!r}, 'a').write('x'); raise SystemExit('no TileLang')")
    )
    result = builder(*(request(str(i)) for i in range(5)))
    assert len(result.failures) == 5
    assert "no TileLang" in result.failures[0].error.message
    assert starts.read_text() == "xx"


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
import test_build as t
t.build_module.LOWER_WORKER = (str(Path(t.__file__).with_name("fake_lower_worker.py")),)
builder = t.Builder(Path({folder!r}))
print(len(builder(t.request("early")).built), flush=True)
builder.kit.set_mode("hang")
print("hanging", flush=True)
try:
    builder(t.request("late"), t.request("later", "hang\\n"))
except KeyboardInterrupt:
    print("interrupted")
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_build_leaves_no_process_and_a_usable_store(
    tmp_path: Path, number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = INTERRUPTED.format(tests=str(Path(__file__).parent), root=str(ROOT), folder=str(tmp_path))
    workers_before = lower_workers()
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        assert process.stdout is not None
        assert [process.stdout.readline(), process.stdout.readline()] == ["1\n", "hanging\n"]
        wait_until(lambda: len(lower_workers() - workers_before) == 2, "the worker and the child that hangs")
        started = time.monotonic()
        process.send_signal(number)
        assert process.stdout.read() == "interrupted\n"
        assert process.wait(10) == 0
    assert time.monotonic() - started < 5
    wait_until(lambda: not running("sleep", tmp_path) and not lower_workers() - workers_before, "no process left")
    monkeypatch.setattr(build_module, "LOWER_WORKER", (str(Path(__file__).with_name("fake_lower_worker.py")),))
    kit = FakeToolkit(tmp_path / "cuda")
    kit.set_mode("ok")
    requests = [request("early"), request("late")]
    result = build(make_plan(requests, FACTS), Store(tmp_path / "artifacts"), kit.toolchain(), TILELANG)
    assert (result.hits, len(result.built)) == (1, 2)
    assert list((tmp_path / "artifacts/tmp").iterdir()) == []


def lower_workers() -> set[int]:
    """Pids of processes that run the fake worker."""
    found = set()
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if (path / "cmdline").read_bytes().rstrip(b"\0").endswith(b"fake_lower_worker.py"):
                found.add(int(path.name))
    return found


def wait_until(condition: Callable[[], bool], what: str) -> None:
    """Give processes some time to start or to go."""
    for _ in range(1000):
        if condition():
            return
        time.sleep(0.01)
    raise AssertionError(f"did not come about: {what}")


# ---- scheduling


def test_jobs_are_bounded() -> None:
    assert job_count(16, 128 << 30, None) == 16
    assert job_count(16, 6 << 30, None) == 4
    assert job_count(16, 1 << 20, None) == 1
    assert job_count(2, 1 << 20, 8) == 8
    with pytest.raises(ArgumentError, match="-j 0"):
        job_count(2, 1 << 34, 0)


def test_workers_stay_with_their_group_and_spread_over_groups() -> None:
    queue = CompileQueue([("a", 1), ("b", 2), ("a", 3), ("b", 4), ("a", 5), ("c", 6)])
    assert queue.take(None) == ("a", 1)
    assert queue.take(None) == ("b", 2)
    assert queue.take("a") == ("a", 3)
    assert queue.take("b") == ("b", 4)
    assert queue.take("b") == ("c", 6)
    assert queue.take("c") == ("a", 5)
    assert queue.take("a") is None
    assert queue.take("a") is None
    assert (queue.is_shared("a"), queue.is_shared("c")) == (True, False)


# ---- explaining


def test_explain_tells_what_changed(builder: Builder) -> None:
    def explanation(one: BuildRequest, facts: BuildFacts = FACTS) -> build_module.Explanation:
        return explain(make_plan([one], facts), builder.store)

    first = explanation(request("a"))
    assert (first.is_lowered, first.is_compiled, first.changed) == (False, False, ())
    builder(request("a"), request("b"))
    assert explanation(request("a")).is_compiled
    changed = explanation(request("a", pass_configs={"tl.x": 1}))
    assert [(one.field, one.stored, one.now) for one in changed.changed] == [("pass configs.tl.x", None, 1)]
    newer = explanation(request("a"), replace(FACTS, compiling={"cuda": "newer"}))
    assert (newer.is_lowered, newer.is_compiled) == (True, False)
    assert [(one.field, one.stored, one.now) for one in newer.changed] == [("cuda", "fake", "newer")]
    assert newer.text().splitlines()[-2:] == ["changed since the newest stored build:", '  cuda: "fake" -> "newer"']
    json.dumps(newer.to_json())


def test_stored_variants_are_loaded_without_building(builder: Builder) -> None:
    a, twin, b = request("a", "same\n"), request("twin", "same\n", extra_flags=("-DX",)), request("b")
    built = {one.variant: one for one in builder(a, b).built}
    assert load_built(make_plan([a, twin, b, request("c")], FACTS), builder.store) == built


def test_one_kernel_that_does_not_fit_its_spec_hides_no_other(builder: Builder) -> None:
    a, b = request("a"), request("b")
    builder(a, b)
    misfit = replace(a, signature=replace(SIGNATURE, args=(ArgSpec("x", "inout", DtypeRule("float32"), (Expr("N"),)),)))
    plan = make_plan([misfit, b], FACTS)
    misfits: dict[str, TkbuildError] = {}
    assert set(load_built(plan, builder.store, misfits.__setitem__)) == {b.variant}
    assert set(misfits) == {a.variant}
    warnings: list[str] = []
    builder.store.warn = warnings.append
    assert set(load_built(plan, builder.store)) == {b.variant}
    assert warnings == [f"{a.variant} is stored but does not fit its spec: {misfits[a.variant]}"]
    assert builder.store.gc(keep=needed_keys(plan, builder.store)) == []


def test_lowered_kernels_of_present_specs_are_needed_without_their_cubins(builder: Builder) -> None:
    builder(request("a"), request("gone"))
    plan = make_plan([request("a"), request("new")], FACTS)
    (step, _) = plan.steps
    for entry in list(builder.store.entries("cubins")):
        (entry.path / "kernel.cubin").write_bytes(b"")
        with pytest.warns(UserWarning, match="is damaged"):
            builder.store.get("cubins", entry.key)
    builder.store.gc(keep=needed_keys(plan, builder.store))
    assert [entry.key for entry in builder.store.entries()] == [step.key]


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

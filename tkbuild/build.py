"""Run a plan: what the store lacks is lowered, compiled, checked and put; everything else is read from it."""

from __future__ import annotations

import functools
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tkbuild.build_options import BuildOptions
from tkbuild.compile import Compiler, check_allowed
from tkbuild.errors import LowerError, StepTimeoutError, StoreError, TkbuildError, WorkFolderError
from tkbuild.lowering import Lowerer
from tkbuild.plan import BuildPlan, BuildRequest, CompileStep, LowerStep
from tkbuild.schedule import CompileQueue, header_group, machine_job_count
from tkbuild.store import Artifact, Store
from tkbuild.stored import BuiltVariant, built_variant, compile_step_of, launch_plan, stored_results
from tkbuild.toolchain import ProcessGroups, TileLangPackage, Toolchain, stop_signals_interrupt
from tkbuild.workfolder import work_folder

_LOG_TAIL_CHARS = 20_000

Json = Any


# ---- what a build tells


@dataclass(frozen=True)
class BuildEvent:
    """Something happened. kind: started, hit, lowered, compiled, failed or done.

    variants: whom it concerns.  elapsed_s: of the step, or of the build.  finished, total: numbers of variants.
    """

    kind: str
    variants: tuple[str, ...]
    elapsed_s: float
    finished: int
    total: int
    message: str = ""

    def to_json(self) -> dict[str, Json]:
        """Return the event as a JSON object."""
        return asdict(self)


@dataclass(frozen=True)
class BuildFailure:
    """A variant that was not built: the stage, after how long, and why."""

    variant: str
    stage: str
    elapsed_s: float
    error: TkbuildError


@dataclass(frozen=True)
class BuildResult:
    """What a build came to. hits: variants whose cubin was in the store.  lowered, compiled: steps that were run."""

    built: tuple[BuiltVariant, ...]
    failures: tuple[BuildFailure, ...]
    hits: int
    lowered: int
    compiled: int
    elapsed_s: float


def build(
    plan: BuildPlan,
    store: Store,
    toolchain: Toolchain,
    tilelang: TileLangPackage,
    options: BuildOptions | None = None,
    on_event: Callable[[BuildEvent], None] = lambda event: None,
) -> BuildResult:
    """Build what ``plan`` lists and return all of it; a step that fails does not stop the others.

    on_event: called in this thread.  Ctrl-C, SIGTERM and SIGHUP stop the build with KeyboardInterrupt; no process stays behind,
    and what was finished is in the store.  When everything is stored, no compiler and no TileLang is started.
    Raises: StoreError, WorkFolderError, ToolchainError for an arch that the toolchain is too old for.
    """
    for arch in {request.arch for step in plan.steps for request in step.requests}:
        toolchain.require(arch)
    options = options or BuildOptions()
    with work_folder() as folder, stop_signals_interrupt():
        jobs = machine_job_count(options.jobs)
        steps = _Steps(store, toolchain, tilelang, folder, options, jobs)
        return _BuildRun(plan, store, steps, jobs, on_event).finish()


# ---- single steps


class _Steps:
    """Takes the result of a step from the store, or makes it and puts it there. Threads may share it.

    lowered, compiled: how many were made.
    """

    def __init__(
        self, store: Store, toolchain: Toolchain, tilelang: TileLangPackage, folder: Path, options: BuildOptions, jobs: int
    ) -> None:
        self.lowered = self.compiled = 0
        self._store, self._options = store, options
        self._groups = ProcessGroups()
        self._lowerer = Lowerer(folder, self._groups)
        self._compiler = Compiler(toolchain, tilelang.include_dirs, folder, groups=self._groups, headers_kept=jobs)
        self._compiling: dict[str, Future[tuple[Artifact, bool]]] = {}
        self._lock = threading.Lock()

    def lower(self, step: LowerStep) -> tuple[Artifact, bool]:
        """Return the lowered kernel, and whether it was made now. Raises: LowerError, StepTimeoutError, WorkFolderError."""
        stored = self._store.get("lowered", step.key)
        if stored is not None:
            return stored, False
        request = step.requests[0]
        files = self._lowerer.lower(request, self._options.step_timeout_s)
        log = files.pop("log").decode(errors="replace")[-_LOG_TAIL_CHARS:]
        files["source.txt"] = request.source.encode()
        with self._lock:
            self.lowered += 1
        facts = {"variants": list(step.variants), "log": log}
        return self._store.put("lowered", step.key, fields=step.fields, facts=facts, files=files), True

    def compile(self, step: CompileStep, variant: str, shares_headers: bool) -> tuple[Artifact, bool]:
        """Return the cubin, and whether this build made it; of threads that ask for the same, one works and the others wait.

        Raises: CompileError, StepTimeoutError, WorkFolderError, ToolchainError.
        """
        mine: Future[tuple[Artifact, bool]] = Future()
        with self._lock:
            future = self._compiling.setdefault(step.key, mine)
        if future is mine:
            try:
                future.set_result(self._compile(step, variant, shares_headers))
            except BaseException as exc:
                future.set_exception(exc)
        return future.result()

    def _compile(self, step: CompileStep, variant: str, shares_headers: bool) -> tuple[Artifact, bool]:
        stored = self._store.get("cubins", step.key)
        if stored is not None:
            return stored, False
        shares = shares_headers and self._options.share_headers
        timeout_s = self._options.step_timeout_s
        compiled = self._compiler.compile(step.cuda_source, step.arch, step.flags, timeout_s, share_headers=shares)
        with self._lock:
            self.compiled += 1
        facts = {"variants": [variant], "resources": compiled.resources_json(), "log": compiled.log}
        files = {"kernel.cubin": compiled.cubin}
        return self._store.put("cubins", step.key, fields=step.fields, facts=facts, files=files), True

    def close(self) -> None:
        """End every process."""
        self._groups.close()
        self._lowerer.close()
        self._compiler.close()


# ---- all of them


class _BuildRun:
    """One run of one plan. Steps run in threads; they post what follows from them, which the calling thread does."""

    def __init__(self, plan: BuildPlan, store: Store, steps: _Steps, jobs: int, on_event: Callable[[BuildEvent], None]) -> None:
        self._plan, self._store, self._steps, self._jobs, self._on_event = plan, store, steps, jobs, on_event
        self._started = time.monotonic()
        self._built: dict[str, BuiltVariant] = {}
        self._failures: dict[str, BuildFailure] = {}
        self._hits = 0
        self._to_compile: list[tuple[CompileStep, BuildRequest, Artifact]] = []
        self._posted: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()

    def finish(self) -> BuildResult:
        """Do everything and return the result."""
        try:
            missing = [step for step in self._plan.steps if not self._take_stored(step)]
            if missing:
                self._run_steps(missing)
        finally:
            self._steps.close()
        self._emit("done", (), self._started)
        return BuildResult(
            tuple(self._built[variant] for variant in self._plan.variants if variant in self._built),
            tuple(self._failures.values()),
            self._hits,
            self._steps.lowered,
            self._steps.compiled,
            time.monotonic() - self._started,
        )

    def _take_stored(self, step: LowerStep) -> bool:
        """Take a step's results from the store if all of them are there."""
        stored = stored_results(step, self._plan.facts, self._store)
        for request, lowered, cubin in stored or ():
            self._finish_variant(request, lowered, cubin, "hit", time.monotonic())
        return stored is not None

    def _run_steps(self, steps: list[LowerStep]) -> None:
        """Lower first, which takes a tenth of the time, then compile in an order that parses each set of headers once."""
        self._in_threads([functools.partial(self._lower, step) for step in steps])
        waiting = CompileQueue((header_group(item[0]), item) for item in self._to_compile)
        self._in_threads([functools.partial(self._compile_all, waiting)] * min(self._jobs, len(self._to_compile)))

    def _in_threads(self, tasks: list[Callable[[], None]]) -> None:
        """Run ``tasks`` and, in this thread, what they post; an error that is no failure of a variant ends the build."""
        if not tasks:
            return
        pool = ThreadPoolExecutor(min(self._jobs, len(tasks)))
        futures = [pool.submit(task) for task in tasks]
        threading.Thread(target=self._announce_end, args=(futures,), daemon=True).start()
        try:
            while (posted := self._posted.get()) is not None:
                posted()
            for future in futures:
                if future.done():
                    future.result()
        except BaseException:
            self._steps.close()
            raise
        finally:
            pool.shutdown(wait=True, cancel_futures=True)

    def _announce_end(self, futures: list[Future[None]]) -> None:
        wait(futures, return_when=FIRST_EXCEPTION)
        self._posted.put(None)

    # -- in threads

    def _lower(self, step: LowerStep) -> None:
        started = time.monotonic()
        self._post(self._emit, "started", step.variants, started)
        try:
            lowered, is_new = self._steps.lower(step)
        except (LowerError, StepTimeoutError, WorkFolderError) as exc:
            self._post(self._fail, step.variants, "lower", started, exc)
            return
        if is_new:
            self._post(self._emit, "lowered", step.variants, started)
        for request in step.requests:
            self._plan_compile(request, lowered)

    def _plan_compile(self, request: BuildRequest, lowered: Artifact) -> None:
        started = time.monotonic()
        try:
            launch_plan(request, lowered)  # what it refuses need not be compiled
        except TkbuildError as exc:
            self._post(self._fail, (request.variant,), "launch plan", started, exc)
            return
        self._to_compile.append((compile_step_of(lowered, request, self._plan.facts), request, lowered))

    def _compile_all(self, waiting: CompileQueue) -> None:
        group = None
        while (taken := waiting.take(group)) is not None:
            group, (step, request, lowered) = taken
            self._compile(step, request, lowered, waiting.is_shared(group))

    def _compile(self, step: CompileStep, request: BuildRequest, lowered: Artifact, shares_headers: bool) -> None:
        started = time.monotonic()
        try:
            cubin, is_new = self._steps.compile(step, request.variant, shares_headers)
        except StoreError:
            raise
        except TkbuildError as exc:
            self._post(self._fail, (request.variant,), "compile", started, exc)
            return
        self._post(self._finish_variant, request, lowered, cubin, "compiled" if is_new else "hit", started)

    def _post(self, function: Callable[..., None], *arguments: Any) -> None:
        self._posted.put(functools.partial(function, *arguments))

    # -- in the calling thread

    def _finish_variant(self, request: BuildRequest, lowered: Artifact, cubin: Artifact, kind: str, started: float) -> None:
        """Make the launch plan and apply the spec's limits; both are cheap and hold for stored results too."""
        try:
            built = built_variant(request, lowered, cubin)
            check_allowed(request.variant, built.resources, request.allow)
        except TkbuildError as exc:
            self._fail((request.variant,), "check", started, exc)
            return
        self._built[request.variant] = built
        self._hits += kind == "hit"
        self._emit(kind, (request.variant,), started)

    def _fail(self, variants: tuple[str, ...], stage: str, started: float, error: TkbuildError) -> None:
        elapsed = time.monotonic() - started
        for variant in variants:
            self._failures[variant] = BuildFailure(variant, stage, elapsed, error)
        self._emit("failed", variants, started, f"{stage}, after {elapsed:.1f} s: {error.message}")

    def _emit(self, kind: str, variants: tuple[str, ...], started: float, message: str = "") -> None:
        finished, total = len(self._built) + len(self._failures), len(self._plan.variants)
        self._on_event(BuildEvent(kind, variants, time.monotonic() - started, finished, total, message))

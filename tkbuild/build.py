"""Run a plan: what the store lacks is lowered, compiled, checked and put; everything else is read from it."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import queue
import shutil
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any

from tkbuild.compile import CompiledKernel, Compiler, check_allowed
from tkbuild.digest import bytes_digest
from tkbuild.errors import ArgumentError, LowerError, StepTimeoutError, StoreError, TkbuildError
from tkbuild.forking import ForkClient, ServerEndedError, start_server
from tkbuild.frontend import CannotFork, split_headers
from tkbuild.launchplan import make_launch_plan
from tkbuild.plan import BuildFacts, BuildPlan, BuildRequest, CompileStep, FieldChange, LowerStep, changed_fields, compile_step
from tkbuild.store import Artifact, Store
from tkbuild.toolchain import ProcessGroups, TileLangPackage, Toolchain, clean_environment, work_folder

STEP_TIMEOUT_S = 600.0
_IMPORT_TIMEOUT_S = 300.0
# Waiting in the operating system takes no more than 2**31 milliseconds.
_MAX_STEP_TIMEOUT_S = 1e6
# What one job may need: a front end with its headers, an assembler, a share of TileLang.
_JOB_BYTES = 1_500_000_000
_LOG_TAIL_CHARS = 20_000

#: What the interpreter runs to lower kernels.
LOWER_WORKER = ("-m", "tkbuild.lower_worker")

Json = Any


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
class BuiltVariant:
    """A variant that is in the store, under its two keys. plan: its launch plan.  resources: by kernel function."""

    request: BuildRequest
    plan: Mapping[str, Json]
    cubin: bytes = field(repr=False)
    cubin_sha256: str
    resources: Mapping[str, Mapping[str, int]]
    lower_key: str
    compile_key: str

    @property
    def variant(self) -> str:
        """The variant's id."""
        return self.request.variant


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


@dataclass(frozen=True)
class BuildOptions:
    """How a build runs; nothing here can change its results. jobs None: as many as cores and memory allow.

    Raises: ArgumentError for a time that is no time to wait.
    """

    jobs: int | None = None
    step_timeout_s: float = STEP_TIMEOUT_S
    share_headers: bool = True

    def __post_init__(self) -> None:
        if not 0 < self.step_timeout_s <= _MAX_STEP_TIMEOUT_S:  # refuses NaN as well
            raise ArgumentError(
                f"--timeout {self.step_timeout_s:g}: expected more than 0 and at most {_MAX_STEP_TIMEOUT_S:.0f} seconds",
                step_timeout_s=self.step_timeout_s,
            )


def job_count(cores: int, memory_bytes: int, wanted: int | None) -> int:
    """Return how many steps run at once. Raises: ArgumentError for fewer than one."""
    if wanted is not None and wanted < 1:
        raise ArgumentError(f"-j {wanted}: expected at least 1", jobs=wanted)
    return wanted or max(1, min(cores, memory_bytes // _JOB_BYTES))


def _machine_job_count(wanted: int | None) -> int:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return job_count(cores, os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), wanted)


def build(
    plan: BuildPlan,
    store: Store,
    toolchain: Toolchain,
    tilelang: TileLangPackage,
    options: BuildOptions | None = None,
    on_event: Callable[[BuildEvent], None] = lambda event: None,
) -> BuildResult:
    """Build what ``plan`` lists and return all of it; a step that fails does not stop the others.

    on_event: called in this thread.  Ctrl-C and SIGTERM stop the build with KeyboardInterrupt; no process stays behind,
    and what was finished is in the store.  When everything is stored, no compiler and no TileLang is started.
    Raises: StoreError, ToolchainError for an arch that the toolchain is too old for.
    """
    for arch in {request.arch for step in plan.steps for request in step.requests}:
        toolchain.require(arch)
    options = options or BuildOptions()
    with work_folder() as folder, _sigterm_interrupts():
        jobs = _machine_job_count(options.jobs)
        return _BuildRun(plan, store, _Tools(toolchain, tilelang, folder, options, jobs), jobs, on_event).finish()


@contextlib.contextmanager
def _sigterm_interrupts() -> Iterator[None]:
    """Within the block SIGTERM does what Ctrl-C does. Only a main thread can ask for that; elsewhere nothing changes."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


class _Tools:
    """The processes of a build, started when the first step needs them."""

    def __init__(self, toolchain: Toolchain, tilelang: TileLangPackage, folder: Path, options: BuildOptions, jobs: int) -> None:
        self.groups = ProcessGroups()
        self._folder, self._numbers = folder, count()
        self._shared, self._alone = _LowerServer(folder, self.groups), _LowerServer(folder, self.groups)
        self._retrying = threading.Lock()
        self._compiler = Compiler(toolchain, tilelang.include_dirs, folder, groups=self.groups, headers_kept=jobs)
        self._share_headers = options.share_headers
        self._timeout_s = options.step_timeout_s

    def lower(self, request: BuildRequest) -> dict[str, bytes]:
        """Return the files of a lowered kernel and ``log``; a second try if the server ends under it.

        Raises: LowerError, StepTimeoutError.
        """
        with contextlib.suppress(ServerEndedError):
            return self._lower_with(self._shared, request)
        # One at a time: a kernel that ends its server again takes no other one with it.
        with self._retrying:
            try:
                return self._lower_with(self._alone, request)
            except ServerEndedError as exc:
                raise LowerError(f"the process that lowers kernels failed twice: {exc}\n{self._worker_log()}") from exc

    def _lower_with(self, server: _LowerServer, request: BuildRequest) -> dict[str, bytes]:
        folder = self._folder / f"lower-{next(self._numbers)}"
        write_lower_job(folder, request)
        try:
            return read_lower_result(folder, server.run(folder, self._timeout_s))
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _worker_log(self) -> str:
        log = self._folder / "lower-worker.log"
        return log.read_text(errors="replace")[-2000:] if log.exists() else ""

    def compile(self, step: CompileStep, shares_headers: bool) -> CompiledKernel:
        """Compile. Raises: CompileError, StepTimeoutError."""
        shares_headers = shares_headers and self._share_headers
        return self._compiler.compile(step.cuda_source, step.arch, step.flags, self._timeout_s, share_headers=shares_headers)

    def close(self) -> None:
        """End every process."""
        self.groups.close()
        self._shared.close()
        self._alone.close()
        self._compiler.close()


class _LowerServer:
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
                    self._client = start_lower_worker(self._folder, self._groups)
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


def start_lower_worker(folder: Path, groups: ProcessGroups) -> ForkClient:
    """Start the process that lowers kernels and wait until it has imported TileLang. Raises: ServerEndedError."""
    package_root = str(Path(__file__).resolve().parent.parent)
    env = {**clean_environment(temp_dir=folder), "PYTHONHASHSEED": "0", "PYTHONDONTWRITEBYTECODE": "1", "HOME": str(folder)}
    env |= {"PYTHONPATH": package_root, "CUDA_VISIBLE_DEVICES": "", "TILELANG_CACHE_DIR": str(folder / "tilelang-cache")}
    process = start_server(groups, [sys.executable, *LOWER_WORKER], folder, env, folder / "lower-worker.log")
    return ForkClient(process, groups, ready_timeout_s=_IMPORT_TIMEOUT_S)


def write_lower_job(folder: Path, request: BuildRequest) -> None:
    """Write a job for lower_worker.py; the source can import the files it declared and no others."""
    (folder / "sources").mkdir(parents=True)
    for name, content in request.sources.items():
        (folder / "sources" / name).write_bytes(content)
    job = {"source": request.source, "arch": str(request.arch), "pass_configs": dict(request.pass_configs)}
    (folder / "request.json").write_text(json.dumps(job))


def read_lower_result(folder: Path, status: int) -> dict[str, bytes]:
    """Return what a job left, and its log. Raises: LowerError with the reason, or with the end of the log of a crash."""
    log = (folder / "log").read_bytes() if (folder / "log").exists() else b""
    tail = log.decode(errors="replace")[-2000:]
    if status != 0:
        reason = f"lowering ended with status {status}; the end of its output:\n{tail}"
        with contextlib.suppress(OSError, ValueError, LookupError, TypeError):  # none, or half of one: the disk was full
            reason = json.loads((folder / "error.json").read_text())["message"]
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


class _BuildRun:
    """One run of one plan."""

    def __init__(self, plan: BuildPlan, store: Store, tools: _Tools, jobs: int, on_event: Callable[[BuildEvent], None]) -> None:
        self._plan, self._store, self._tools, self._on_event = plan, store, tools, on_event
        self._jobs = jobs
        self._started = time.monotonic()
        self._total = len(plan.variants)
        self._built: dict[str, BuiltVariant] = {}
        self._failures: dict[str, BuildFailure] = {}
        self._counts = {"hit": 0, "lowered": 0, "compiled": 0}
        self._events: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._compiling: dict[str, Future[tuple[Artifact, str]]] = {}
        self._to_compile: list[tuple[CompileStep, BuildRequest, Artifact]] = []
        self._lock = threading.Lock()

    def finish(self) -> BuildResult:
        """Do everything and return the result."""
        try:
            missing = [step for step in self._plan.steps if not self._take_stored(step)]
            if missing:
                self._run_steps(missing)
        finally:
            self._tools.close()
        self._emit("done", (), self._started)
        order = [variant for variant in self._plan.variants if variant in self._built]
        return BuildResult(
            tuple(self._built[variant] for variant in order),
            tuple(self._failures.values()),
            self._counts["hit"],
            self._counts["lowered"],
            self._counts["compiled"],
            time.monotonic() - self._started,
        )

    def _take_stored(self, step: LowerStep) -> bool:
        """Take a step's results from the store if all of them are there."""
        stored = _stored(step, self._plan.facts, self._store)
        for request, lowered, cubin in stored or ():
            self._finish_variant(request, lowered, cubin, "hit", time.monotonic())
        return stored is not None

    def _run_steps(self, steps: list[LowerStep]) -> None:
        """Lower first, which takes a tenth of the time, then compile in an order that parses each set of headers once."""
        self._in_threads([functools.partial(self._run_lower, step) for step in steps])
        queue_ = CompileQueue((split_key(step), (step, request, lowered)) for step, request, lowered in self._to_compile)
        self._in_threads([functools.partial(self._compile_all, queue_)] * min(self._jobs, len(self._to_compile)))

    def _in_threads(self, tasks: list[Callable[[], None]]) -> None:
        """Run ``tasks`` and, in this thread, what they post; an error that is no failure of a variant ends the build."""
        if not tasks:
            return
        pool = ThreadPoolExecutor(min(self._jobs, len(tasks)))
        futures = [pool.submit(task) for task in tasks]
        threading.Thread(target=self._announce_end, args=(futures,), daemon=True).start()
        try:
            while (event := self._events.get()) is not None:
                event()
            for future in futures:
                if future.done():
                    future.result()
        except BaseException:
            self._tools.close()
            raise
        finally:
            pool.shutdown(wait=True, cancel_futures=True)

    def _announce_end(self, futures: list[Future[None]]) -> None:
        wait(futures, return_when=FIRST_EXCEPTION)
        self._events.put(None)

    def _run_lower(self, step: LowerStep) -> None:
        started = time.monotonic()
        self._post("started", step.variants, started)
        try:
            lowered = self._lower(step)
        except (LowerError, StepTimeoutError) as exc:
            self._fail(step.variants, "lower", started, exc)
            return
        for request in step.requests:
            self._plan_compile(request, lowered)

    def _plan_compile(self, request: BuildRequest, lowered: Artifact) -> None:
        started = time.monotonic()
        try:
            _launch_plan(request, lowered)  # what it refuses need not be compiled
        except TkbuildError as exc:
            self._fail((request.variant,), "launch plan", started, exc)
            return
        step = compile_step(lowered.files["kernel.cu"].decode(), request, self._plan.facts)
        with self._lock:
            self._to_compile.append((step, request, lowered))

    def _lower(self, step: LowerStep) -> Artifact:
        stored = self._store.get("lowered", step.key)
        if stored is not None:
            return stored
        started = time.monotonic()
        files = self._tools.lower(step.requests[0])
        log = files.pop("log").decode(errors="replace")[-_LOG_TAIL_CHARS:]
        files["source.txt"] = step.requests[0].source.encode()
        facts = {"variants": list(step.variants), "log": log}
        lowered = self._store.put("lowered", step.key, fields=step.fields, facts=facts, files=files)
        self._post("lowered", step.variants, started, count="lowered")
        return lowered

    def _compile_all(self, queue_: CompileQueue) -> None:
        group = None
        while (taken := queue_.take(group)) is not None:
            group, (step, request, lowered) = taken
            self._compile_variant(step, request, lowered, shares=queue_.is_shared(group))

    def _compile_variant(self, step: CompileStep, request: BuildRequest, lowered: Artifact, shares: bool) -> None:
        started = time.monotonic()
        try:
            cubin, kind = self._compile_once(step, request, shares)
        except StoreError:
            raise
        except TkbuildError as exc:
            self._fail((request.variant,), "compile", started, exc)
            return
        self._events.put(lambda: self._finish_variant(request, lowered, cubin, kind, started))

    def _compile_once(self, step: CompileStep, request: BuildRequest, shares: bool) -> tuple[Artifact, str]:
        """Return the cubin and the kind of its event; compile, or wait for another thread that compiles the same."""
        with self._lock:
            future = self._compiling.get(step.key)
            is_mine = future is None
            if future is None:
                future = self._compiling[step.key] = Future()
        if is_mine:
            try:
                future.set_result(self._compile(step, request, shares))
            except BaseException as exc:
                future.set_exception(exc)
        return future.result()

    def _compile(self, step: CompileStep, request: BuildRequest, shares: bool) -> tuple[Artifact, str]:
        stored = self._store.get("cubins", step.key)
        if stored is not None:
            return stored, "hit"
        compiled = self._tools.compile(step, shares)
        facts = {"variants": [request.variant], "resources": compiled.resources_json(), "log": compiled.log}
        with self._lock:
            self._counts["compiled"] += 1
        files = {"kernel.cubin": compiled.cubin}
        return self._store.put("cubins", step.key, fields=step.fields, facts=facts, files=files), "compiled"

    def _finish_variant(self, request: BuildRequest, lowered: Artifact, cubin: Artifact, kind: str, started: float) -> None:
        """Make the launch plan and apply the spec's limits; both are cheap and hold for stored results too."""
        try:
            built = _built_variant(request, lowered, cubin)
            check_allowed(request.variant, built.resources, request.allow)
        except TkbuildError as exc:
            self._record_failure((request.variant,), "check", started, exc)
            return
        self._built[request.variant] = built
        if kind == "hit":
            self._counts["hit"] += 1
        self._emit(kind, (request.variant,), started)

    def _fail(self, variants: tuple[str, ...], stage: str, started: float, error: TkbuildError) -> None:
        self._events.put(lambda: self._record_failure(variants, stage, started, error))

    def _record_failure(self, variants: tuple[str, ...], stage: str, started: float, error: TkbuildError) -> None:
        elapsed = time.monotonic() - started
        for variant in variants:
            self._failures[variant] = BuildFailure(variant, stage, elapsed, error)
        self._emit("failed", variants, started, f"{stage}, after {elapsed:.1f} s: {error.message}")

    def _post(self, kind: str, variants: tuple[str, ...], started: float, count: str = "") -> None:
        """Emit an event from a worker thread."""
        if count:
            with self._lock:
                self._counts[count] += 1
        self._events.put(lambda: self._emit(kind, variants, started))

    def _emit(self, kind: str, variants: tuple[str, ...], started: float, message: str = "") -> None:
        finished = len(self._built) + len(self._failures)
        self._on_event(BuildEvent(kind, variants, time.monotonic() - started, finished, self._total, message))


def load_built(
    plan: BuildPlan, store: Store, on_misfit: Callable[[str, TkbuildError], None] | None = None
) -> dict[str, BuiltVariant]:
    """Return by id those variants of ``plan`` that are in the store, verified; builds nothing.

    A stored kernel that does not fit its spec any more is left out. on_misfit: told its variant and the reason; without
    it, the store's ``warn`` is told.
    """
    found = {}
    for step in plan.steps:
        for request in step.requests:
            stored = _stored(replace(step, requests=(request,)), plan.facts, store)
            if not stored:
                continue
            try:
                found[request.variant] = _built_variant(*stored[0])
            except TkbuildError as exc:
                if on_misfit is None:
                    store.warn(f"{request.variant} is stored but does not fit its spec: {exc}")
                else:
                    on_misfit(request.variant, exc)
    return found


def needed_keys(plan: BuildPlan, store: Store) -> set[str]:
    """Return the keys of all entries that ``plan`` makes use of, stored or not; those of cubins as far as they are known.

    A cubin's key is known once its kernel is lowered. Raises: StoreError.
    """
    keys = {step.key for step in plan.steps}
    for step in plan.steps:
        lowered = store.get("lowered", step.key)
        if lowered is not None:
            keys |= {compile_step(lowered.files["kernel.cu"].decode(), one, plan.facts).key for one in step.requests}
    return keys


def _stored(step: LowerStep, facts: BuildFacts, store: Store) -> list[tuple[BuildRequest, Artifact, Artifact]] | None:
    """Return what the store has for each request of a step, or None if anything is missing."""
    lowered = store.get("lowered", step.key)
    if lowered is None:
        return None
    cubins: dict[str, Artifact] = {}
    found = []
    for request in step.requests:
        key = compile_step(lowered.files["kernel.cu"].decode(), request, facts).key
        cubin = cubins.get(key) or store.get("cubins", key)
        if cubin is None:
            return None
        cubins[key] = cubin
        found.append((request, lowered, cubin))
    return found


def _built_variant(request: BuildRequest, lowered: Artifact, cubin: Artifact) -> BuiltVariant:
    content = cubin.files["kernel.cubin"]
    plan = _launch_plan(request, lowered)
    return BuiltVariant(request, plan, content, bytes_digest(content), cubin.facts["resources"], lowered.key, cubin.key)


def _launch_plan(request: BuildRequest, lowered: Artifact) -> dict[str, Json]:
    return make_launch_plan(
        request.signature,
        variant=request.variant,
        arch=str(request.arch),
        axes=request.axes,
        launch_facts=json.loads(lowered.files["plan.json"]),
        programmatic=request.programmatic,
    )


def split_key(step: CompileStep) -> tuple[str, ...]:
    """Return what compile steps have in common that can share a front end."""
    try:
        headers = split_headers(step.cuda_source)[0]
    except CannotFork:
        headers = ""
    return (headers, str(step.arch), *step.flags)


class CompileQueue:
    """Hands out items group by group. A worker stays with its group; a free one goes where most work per worker is left."""

    def __init__(self, items: Iterable[tuple[Any, Any]]) -> None:
        self._lock = threading.Lock()
        self._left: dict[Any, list[Any]] = {}
        self._workers: Counter[Any] = Counter()
        for group, item in items:
            self._left.setdefault(group, []).append(item)
        self._sizes = {group: len(items) for group, items in self._left.items()}

    def is_shared(self, group: Any) -> bool:
        """Whether the group began with more than one item."""
        return self._sizes[group] > 1

    def take(self, group: Any) -> tuple[Any, Any] | None:
        """Return the next group and item for a worker whose last item was of ``group`` (None: its first), or None at the end."""
        with self._lock:
            if not self._left.get(group):
                if group is not None:
                    self._workers[group] -= 1
                group = max((one for one, items in self._left.items() if items), key=self._share, default=None)
                if group is None:
                    return None
                self._workers[group] += 1
            return group, self._left[group].pop(0)

    def _share(self, group: Any) -> float:
        return len(self._left[group]) / (self._workers[group] + 1)


@dataclass(frozen=True)
class Explanation:
    """Why a variant is or is not stored. lower, compile: the fields of its keys now; compile is empty before it was lowered.

    changed: what differs from the newest stored build of this variant, if the current one is not stored.
    """

    variant: str
    lower_key: str
    lower: Mapping[str, Json]
    is_lowered: bool
    compile_key: str
    compile: Mapping[str, Json]
    is_compiled: bool
    changed: tuple[FieldChange, ...]

    def to_json(self) -> dict[str, Json]:
        """Return the explanation as a JSON object."""
        return asdict(self)

    def text(self) -> str:
        """Return the explanation for a reader."""
        lines = [self.variant]
        for title, key, fields, is_stored in (
            ("lowered", self.lower_key, self.lower, self.is_lowered),
            ("compiled", self.compile_key, self.compile, self.is_compiled),
        ):
            if key:
                lines += [f"{title}: {'stored' if is_stored else 'not stored'}, key {key}"]
                lines += [f"  {name}: {json.dumps(value, sort_keys=True)}" for name, value in fields.items()]
        if self.changed:
            lines += ["changed since the newest stored build:"]
            lines += [f"  {one.field}: {json.dumps(one.stored)} -> {json.dumps(one.now)}" for one in self.changed]
        elif not self.is_compiled:
            lines += ["no earlier build of this variant is stored" if not self.is_lowered else "not compiled yet"]
        return "\n".join(lines)


def explain(plan: BuildPlan, store: Store) -> Explanation:
    """Return the key fields of the one variant in ``plan``, and what changed since its newest stored build; builds nothing."""
    (step,) = plan.steps
    (request,) = step.requests
    lowered = store.get("lowered", step.key)
    if lowered is None:
        changed = _changes(store, "lowered", request.variant, step.fields)
        return Explanation(request.variant, step.key, step.fields, False, "", {}, False, changed)
    compiling = compile_step(lowered.files["kernel.cu"].decode(), request, plan.facts)
    is_compiled = store.get("cubins", compiling.key) is not None
    changed = () if is_compiled else _changes(store, "cubins", request.variant, compiling.fields)
    return Explanation(request.variant, step.key, step.fields, True, compiling.key, compiling.fields, is_compiled, changed)


def _changes(store: Store, kind: str, variant: str, now: Mapping[str, Json]) -> tuple[FieldChange, ...]:
    for entry in sorted(store.entries(kind), key=lambda one: one.stored_at, reverse=True):
        artifact = store.get(kind, entry.key)
        if artifact is not None and variant in artifact.facts["variants"]:
            return tuple(changed_fields(artifact.fields, now))
    return ()

"""CUDA source -> cubin bytes, checked, with what each kernel uses."""

from __future__ import annotations

import re
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

from tkbuild.arch import TargetArch
from tkbuild.elf import parse_cubin
from tkbuild.errors import CompileError, IntegrityError
from tkbuild.frontend import SOURCE_NAME, CannotFork, HeaderServer, NvccSteps, build_fork_server, nvcc_steps, split_headers
from tkbuild.toolchain import Finished, ProcessGroups, Toolchain, run
from tkbuild.workfolder import step_folder

_LOG_TAIL_CHARS = 20_000
#: An include by a path, or by a macro that may hold one: the key covers what lies in the toolkit and in TileLang.
_INCLUDE_OF_A_PATH = re.compile(r"^[ \t]*#[ \t]*(?:include|include_next|embed)\b(?![ \t]*<(?!/|[^>\n]*\.\./))(.*)", re.MULTILINE)


@dataclass(frozen=True)
class KernelResources:
    """What one kernel of a cubin uses, sizes in bytes; spills are stores and loads together."""

    registers: int
    spill_bytes: int
    stack_bytes: int
    static_smem_bytes: int


@dataclass(frozen=True)
class CompiledKernel:
    """A checked cubin. resources: by kernel name.  log: what the assembler said, the same on every machine."""

    cubin: bytes
    resources: dict[str, KernelResources]
    log: str

    def resources_json(self) -> dict[str, dict[str, int]]:
        """Return ``resources`` as plain JSON."""
        return {name: asdict(used) for name, used in self.resources.items()}


class Compiler:
    """Compiles with one toolchain; keeps front ends that have parsed their headers. Threads may share it.

    include_dirs: TileLang's headers.  folder: private, removed by the caller.  headers_kept: how many front ends stay
    alive at once; each needs about 0.5 GB.
    """

    def __init__(
        self,
        toolchain: Toolchain,
        include_dirs: Sequence[Path],
        folder: Path,
        *,
        groups: ProcessGroups | None = None,
        headers_kept: int = 2,
    ) -> None:
        self._toolchain, self._include_dirs, self._folder = toolchain, include_dirs, folder
        self._groups = groups or ProcessGroups()
        self._env = toolchain.environment(folder)
        self._pool = _ServerPool(headers_kept)
        self._numbers = count()
        self._library = _Once()
        self._steps: dict[tuple[str, tuple[str, ...]], _Once] = {}
        self._lock = threading.Lock()
        self.forked = 0

    def compile(
        self, source: str, arch: TargetArch, flags: Sequence[str], timeout_s: float, *, share_headers: bool
    ) -> CompiledKernel:
        """Compile one translation unit to SASS for ``arch``.

        flags: from ``flags.compile_flags``.  share_headers: parse headers once for all sources that begin with the
        same; worth it from two sources on. The cubin is the same, and depends on arguments and toolchain, never on folders.
        Raises: CompileError with the compiler's words, StepTimeoutError, WorkFolderError, ToolchainError.
        """
        self._toolchain.require(arch)
        if found := _INCLUDE_OF_A_PATH.search(source):
            raise CompileError(
                f"the CUDA source includes {found.group(1).strip()!r}, expected a header of the toolkit or of TileLang as <name>: no key "
                "covers other files; put what it holds into the template, or into a file that the template includes",
                include=found.group(1).strip(),
            )
        with step_folder(self._folder, f"kernel-{next(self._numbers)}") as folder:
            finished = self._run_steps(source, arch, tuple(flags), folder, timeout_s, share_headers)
            return check_result(folder / "kernel.cubin", finished, arch)

    def _run_steps(
        self, source: str, arch: TargetArch, flags: tuple[str, ...], folder: Path, timeout_s: float, share_headers: bool
    ) -> Finished:
        if share_headers:
            try:
                return self._run_forked(source, arch, flags, folder, timeout_s)
            except CannotFork:
                pass  # the plain steps give the cubin, or the error to show
        (folder / SOURCE_NAME).write_text(source)
        steps = self._steps_for(arch, flags)
        log = ""
        for command in (steps.preprocess, steps.front_end, steps.assemble):
            env = self._front_end_env() if command is steps.front_end else self._env
            finished = run(command, timeout_s=timeout_s, cwd=folder, env=env, groups=self._groups)
            log += finished.stdout + finished.stderr
            if finished.returncode:
                break
        return replace(finished, stdout=log, stderr="")

    def _nvcc(self, arch: TargetArch, flags: Sequence[str]) -> list[str]:
        gencode = f"-gencode=arch={arch.compute},code={arch}"
        includes = [f"-I{path}" for path in self._include_dirs]
        host = f"-ccbin={self._toolchain.host_compiler}"
        return [str(self._toolchain.nvcc), "--cubin", *flags, *includes, gencode, host, "-o", "kernel.cubin", SOURCE_NAME]

    def _run_forked(self, source: str, arch: TargetArch, flags: tuple[str, ...], folder: Path, timeout_s: float) -> Finished:
        headers, body = split_headers(source)
        steps = self._steps_for(arch, flags)
        with self._pool.use((headers, str(arch), flags), lambda: self._start_server(steps, headers)) as server:
            log = server.ptx(body, folder, timeout_s)
        finished = run(steps.assemble, timeout_s=timeout_s, cwd=folder, env=self._env, groups=self._groups)
        with self._lock:
            self.forked += 1
        return replace(finished, stdout=log + finished.stdout)

    def _steps_for(self, arch: TargetArch, flags: tuple[str, ...]) -> NvccSteps:
        with self._lock:
            once = self._steps.setdefault((str(arch), flags), _Once())
        return once.get(lambda: self._ask_steps(arch, flags))  # type: ignore[no-any-return]

    def _ask_steps(self, arch: TargetArch, flags: tuple[str, ...]) -> NvccSteps:
        command = [*self._nvcc(arch, flags), "--dryrun", "--keep", "--keep-dir", "."]
        finished = run(command, timeout_s=60.0, cwd=self._folder, env=self._env, groups=self._groups)
        if finished.returncode:
            raise CompileError(f"nvcc refuses its flags:\n{finished.stderr}", log=finished.stderr, flags=flags)
        return nvcc_steps(finished.stderr)

    def _front_end_env(self) -> dict[str, str]:
        """That of a cicc without random addresses and with its clocks standing still (forkserver.c), where the host allows it."""
        try:
            return {**self._env, "LD_PRELOAD": str(self._fork_server())}
        except CannotFork:
            return self._env

    def _fork_server(self) -> Path:
        compiler = self._toolchain.host_compiler
        built: Path = self._library.get(lambda: build_fork_server(self._folder, compiler, self._env, self._groups))
        return built

    def _start_server(self, steps: NvccSteps, headers: str) -> HeaderServer:
        library = self._fork_server()
        folder = self._folder / f"headers-{next(self._numbers)}"
        folder.mkdir()
        return HeaderServer(steps, headers, folder, library, self._env, self._groups)

    def close(self) -> None:
        """End all front ends."""
        self._pool.close()


class _Once:
    """Makes a value once; later callers get the value, or the exception it ended with."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._value: Any = None
        self._failure: CannotFork | None = None

    def get(self, make: Any) -> Any:
        with self._lock:
            if self._failure is not None:
                raise self._failure
            if self._value is None:
                try:
                    self._value = make()
                except CannotFork as exc:
                    self._failure = exc
                    raise
            return self._value


@dataclass
class _Pooled:
    once: _Once
    users: int = 0
    used_at: int = 0


class _ServerPool:
    """Front ends by headers; beyond ``limit`` the one unused for longest is ended."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._pooled: dict[Any, _Pooled] = {}
        self._clock = count()
        self._lock = threading.Lock()

    @contextmanager
    def use(self, key: Any, make: Any) -> Iterator[HeaderServer]:
        with self._lock:
            pooled = self._pooled.setdefault(key, _Pooled(_Once()))
            pooled.users += 1
            pooled.used_at = next(self._clock)
            surplus = self._take_surplus()
        for other in surplus:
            _close(other)
        try:
            yield pooled.once.get(make)
        finally:
            with self._lock:
                pooled.users -= 1

    def _take_surplus(self) -> list[_Pooled]:
        idle = sorted((item for item in self._pooled.items() if item[1].users == 0), key=lambda item: item[1].used_at)
        surplus = idle[: max(0, len(self._pooled) - self._limit)]
        for key, _ in surplus:
            del self._pooled[key]
        return [pooled for _, pooled in surplus]

    def close(self) -> None:
        with self._lock:
            pooled, self._pooled = list(self._pooled.values()), {}
        for one in pooled:
            _close(one)


def _close(pooled: _Pooled) -> None:
    with suppress(CannotFork):
        server = pooled.once.get(lambda: None)
        if server is not None:
            server.close()


def check_result(path: Path, finished: Finished, arch: TargetArch) -> CompiledKernel:
    """Return what the compiler left at ``path``, after checking that it is what was asked for.

    Raises: CompileError for an exit status, a missing, empty or incomplete file, another target, embedded PTX, or a
    kernel whose resources the assembler did not report.
    """
    log = _stable_log(finished.stdout + finished.stderr)
    if finished.returncode:
        raise CompileError(f"the CUDA compiler {_ending(finished.returncode)}:\n{log}", log=log, returncode=finished.returncode)
    if path.is_symlink() or not path.is_file():
        raise CompileError(f"the CUDA compiler ended well but wrote no cubin; its output:\n{log}", log=log)
    cubin = path.read_bytes()
    try:
        facts = parse_cubin(cubin)
    except IntegrityError as exc:
        raise CompileError(f"the CUDA compiler ended well but its cubin is damaged: {exc}", log=log) from exc
    if facts.arch != str(arch):
        raise CompileError(
            f"the CUDA compiler made a cubin for {facts.arch}, expected {arch}", found=facts.arch, expected=str(arch)
        )
    if facts.has_ptx:
        raise CompileError("the cubin embeds PTX, expected machine code only", sections=sorted(facts.sections))
    resources = parse_resources(log)
    missing = [kernel for kernel in facts.kernels if kernel not in resources]
    if missing or not facts.kernels:
        raise CompileError(f"the assembler reported no resources for {', '.join(missing) or 'any kernel'}:\n{log}", log=log)
    return CompiledKernel(cubin, {kernel: resources[kernel] for kernel in facts.kernels}, log)


def _ending(status: int) -> str:
    if status >= 0:
        return f"failed with status {status}"
    advice = "`tkbuild doctor` tries the toolkit, and `tkbuild doctor --install-toolchain` mends a damaged one"
    if status == -signal.SIGKILL:
        advice = "usually for want of memory: give fewer --jobs"
    return f"was ended by {signal.Signals(-status).name}; {advice}"


def _stable_log(text: str) -> str:
    """Leave out what differs from run to run."""
    kept = [line for line in text.splitlines() if line.strip() and "Compile time =" not in line]
    return "\n".join(kept)[-_LOG_TAIL_CHARS:]


def parse_resources(log: str) -> dict[str, KernelResources]:
    """Return what ``ptxas -v`` says of each kernel, by kernel name."""
    found: dict[str, KernelResources] = {}
    kernel = function = ""
    stack: dict[str, tuple[int, int]] = {}
    for line in log.splitlines():
        if match := re.search(r"Compiling entry function '(\S+)'", line):
            kernel = match.group(1)
        elif match := re.search(r"Function properties for (\S+)", line):
            function = match.group(1)
        elif match := re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", line):
            stack[function] = (int(match.group(1)), int(match.group(2)) + int(match.group(3)))
        elif (match := re.search(r"Used (\d+) registers", line)) and kernel in stack:
            smem = re.search(r"(\d+) bytes smem", line)
            stack_bytes, spill_bytes = stack[kernel]
            found[kernel] = KernelResources(int(match.group(1)), spill_bytes, stack_bytes, int(smem.group(1)) if smem else 0)
    return found


def check_allowed(variant: str, resources: Mapping[str, Mapping[str, int]], allow: Mapping[str, int]) -> None:
    """Compare a cubin's resources with a spec's ``allow``. Raises: CompileError listing every kernel and limit broken."""
    broken = [
        f"{kernel} uses {used[limit]} {limit}, allowed: {most}"
        for kernel, used in sorted(resources.items())
        for limit, most in sorted(allow.items())
        if used[limit] > most
    ]
    if broken:
        raise CompileError(
            f"{variant}: {'; '.join(broken)}; lower the tile or thread count of the template, or raise `allow` in the spec",
            variant=variant,
            broken=broken,
        )

"""Install, find and check the CUDA compiler and its parts; the one place that starts a process."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from tkbuild.arch import TargetArch, least_toolkit
from tkbuild.digest import damaged_files, entries_digest, file_digest, files_digest, key_digest, package_digest, package_entries
from tkbuild.errors import IntegrityError, StepTimeoutError, ToolchainError
from tkbuild.versions import CUDA_REQUIREMENTS, CUDA_VERSION, TILELANG_VERSION
from tkbuild.workfolder import full_disk_told, private_folder, temp_dir

INSTALL_COMMAND = "tkbuild doctor --install-toolchain"
INSTALL_TIMEOUT_S = 1800.0

# Distributions whose content decides a cubin: the compiler's parts and the headers.
_CONTENT_PACKAGES = ("nvidia-cuda-nvcc", "nvidia-nvvm", "nvidia-cuda-crt", "nvidia-cuda-runtime", "nvidia-cuda-cccl")
# The others that an installed toolkit consists of; no cubin depends on them.
_OTHER_PACKAGES = ("cuda-toolkit", "nvidia-cuda-cuobjdump", "nvidia-cuda-nvdisasm")
_TOOLS = ("bin/nvcc", "bin/ptxas", "bin/cudafe++", "nvvm/bin/cicc")
_COMPILER_FILES = (*_TOOLS, "bin/nvcc.profile", "nvvm/libdevice/libdevice.10.bc")
_VERSION_TIMEOUT_S = 30.0
_STOP_SIGNALS = (signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True)
class Finished:
    """A process that ended: its exit status (negative: the signal), what it wrote, and how long it ran."""

    returncode: int
    stdout: str
    stderr: str
    elapsed_s: float


class ProcessGroups:
    """The process groups that are running now, so that an interrupted build can end exactly these."""

    def __init__(self) -> None:
        self._groups: set[int] = set()
        self._lock = threading.Lock()
        self._closed = False

    def start(self, command: Sequence[str | Path], **options: Any) -> subprocess.Popen[Any]:
        """Start ``command`` as the leader of a process group of its own. Raises: ToolchainError if it cannot start."""
        with self._lock, _interrupts_held_back():
            if self._closed:
                raise ToolchainError("the build is being stopped: no process is started any more", command=list(map(str, command)))
            try:
                process = subprocess.Popen(list(map(str, command)), start_new_session=True, **options)
            except OSError as exc:
                raise ToolchainError(
                    f"cannot start {command[0]}: {exc.strerror}; run `{INSTALL_COMMAND}`", tool=str(command[0])
                ) from exc
            self._groups.add(process.pid)
        return process

    def end(self, process: subprocess.Popen[Any]) -> None:
        """Kill what is left of the group of ``process`` and collect its status."""
        if process.poll() is None:
            _kill_group(process.pid)
        process.wait()
        with self._lock:
            self._groups.discard(process.pid)

    def close(self) -> None:
        """Kill every running group; nothing can be started afterwards."""
        with self._lock:
            self._closed = True
            for group in self._groups:
                _kill_group(group)


@contextlib.contextmanager
def stop_signals_interrupt() -> Iterator[None]:
    """Within the block SIGTERM and SIGHUP do what Ctrl-C does, unless they are ignored, as under nohup.

    Only a main thread can ask for that; elsewhere nothing changes.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handlers = {number: signal.getsignal(number) for number in _STOP_SIGNALS}
    # None: of the program that embeds Python, and not to be restored from here.
    before = {number: handler for number, handler in handlers.items() if handler not in (signal.SIG_IGN, None)}
    for number in before:
        signal.signal(number, signal.default_int_handler)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _interrupts_held_back() -> Iterator[None]:
    """Let Ctrl-C and its like wait until a process that was started is known, or nobody would end it."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, *_STOP_SIGNALS})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _kill_group(group: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)


def run(
    command: Sequence[str | Path],
    *,
    timeout_s: float,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    groups: ProcessGroups | None = None,
) -> Finished:
    """Run ``command`` to its end, without a shell, and return what it wrote.

    env: default ``clean_environment()``.  On a time-out, Ctrl-C or any other exception the whole process group is killed.
    Raises: StepTimeoutError with the command and the seconds, ToolchainError if it cannot be started.
    """
    groups = groups or ProcessGroups()
    started = time.monotonic()
    # Files, not pipes: a grandchild that keeps a pipe open would block the reader after the command has ended.
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        environment = clean_environment() if env is None else env
        try:
            process = groups.start(command, stdin=subprocess.DEVNULL, stdout=out, stderr=err, cwd=cwd, env=dict(environment))
        except KeyboardInterrupt:
            groups.close()  # it came while the process was being started
            raise
        try:
            process.wait(timeout_s)
        except subprocess.TimeoutExpired as exc:
            raise StepTimeoutError(
                f"{Path(command[0]).name} was stopped after {timeout_s:g} s; give it longer with --timeout",
                command=list(map(str, command)),
                elapsed_s=time.monotonic() - started,
            ) from exc
        finally:
            groups.end(process)
        return Finished(process.returncode, _text_of(out), _text_of(err), time.monotonic() - started)


def _text_of(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")


def clean_environment(first_in_path: Iterable[Path] = (), temp_dir: Path | None = None) -> dict[str, str]:
    """Return the whole environment of a compiler: nothing of the caller's reaches it but PATH, after ``first_in_path``.

    So CPATH, NVCC_PREPEND_FLAGS, CUDA_HOME and the like have no influence, and messages are in one language.
    """
    path = os.pathsep.join([*map(str, first_in_path), *_absolute_path_entries()])
    return {"PATH": path, "LC_ALL": "C", "LANG": "C", "TZ": "UTC", "TMPDIR": str(temp_dir or tempfile.gettempdir())}


def _absolute_path_entries() -> list[str]:
    return [entry for entry in os.get_exec_path() if entry.startswith("/")]


@dataclass(frozen=True)
class Toolchain:
    """A CUDA toolkit whose parts were found below one root and belong together.

    version: (major, minor).  release: such as ``13.5.37``.  digests: content of each part that can change a cubin.
    """

    root: Path
    host_compiler: Path
    version: tuple[int, int]
    release: str
    host_release: str
    digests: Mapping[str, str]

    @property
    def nvcc(self) -> Path:
        """The compiler driver."""
        return self.root / "bin/nvcc"

    @property
    def ptxas(self) -> Path:
        """The assembler."""
        return self.root / "bin/ptxas"

    def environment(self, temp_dir: Path | None = None) -> dict[str, str]:
        """Return the environment in which this toolkit's tools run."""
        return clean_environment((self.root / "bin", self.root / "nvvm/bin", self.host_compiler.parent), temp_dir)

    def require(self, arch: TargetArch) -> None:
        """Raises: ToolchainError if this toolkit is too old to compile for ``arch``."""
        least = least_toolkit(arch)
        if self.version < least:
            raise ToolchainError(
                f"{arch} needs CUDA {_dotted(least)} or later, found {_dotted(self.version)} at {self.nvcc}; "
                f"run `{INSTALL_COMMAND}` or give --cuda-home",
                arch=str(arch),
                needed=least,
                found=self.version,
                tool=str(self.nvcc),
            )


def _dotted(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"


def default_prefix() -> Path:
    """Return where the pinned toolkit belongs: in ``.toolchain`` of a checkout, else in the user's cache folder."""
    checkout = Path(__file__).resolve().parent.parent
    if (checkout / "pyproject.toml").is_file():
        base = checkout / ".toolchain"
    else:
        named = os.environ.get("XDG_CACHE_HOME", "")  # counts only if it is absolute, as its specification says
        base = (Path(named) if Path(named).is_absolute() else Path.home() / ".cache") / "tkbuild"
    return base / f"cuda-{CUDA_VERSION}"


@stop_signals_interrupt()
def install(
    prefix: Path | None = None, *, timeout_s: float = INSTALL_TIMEOUT_S, tell: Callable[[str], None] = lambda text: None
) -> Path:
    """Install the pinned toolkit with pip into ``prefix``, if it is not there, whole, and return ``prefix``.

    The prefix appears complete or not at all, and what was there before stays until then. tell: takes the reason for
    an installation.  Raises: ToolchainError with pip's last words.
    """
    prefix = prefix or default_prefix()
    problem = damage(prefix)
    if not problem:
        return prefix
    tell(f"{problem}; installing the CUDA toolkit {CUDA_VERSION} to {prefix}")
    try:
        prefix.parent.mkdir(parents=True, exist_ok=True)
        with private_folder(prefix.parent, ".installing-") as temp:
            staging = Path(temp) / "prefix"
            _pip_install(staging, timeout_s)
            if problem := damage(staging):
                raise ToolchainError(f"pip installed a CUDA toolkit that is not whole: {problem}", problem=problem)
            staging.chmod(0o755)
            _publish(staging, prefix)
    except OSError as exc:
        raise ToolchainError(
            f"cannot install the CUDA toolkit to {prefix}: {exc.strerror}; make that folder writable, or give an installed toolkit with --cuda-home",
            prefix=str(prefix),
        ) from exc
    return prefix


def _pip_install(target: Path, timeout_s: float) -> None:
    options = ["--target", str(target), "--no-compile", "--disable-pip-version-check", "--no-input", "--quiet"]
    # pip, unlike a compiler, follows the caller's environment: index, proxy and certificates are set there.
    env = {**os.environ, "TMPDIR": str(target.parent)}  # what it leaves when it is killed goes with the folder
    finished = run([sys.executable, "-m", "pip", "install", *options, *CUDA_REQUIREMENTS], timeout_s=timeout_s, env=env)
    if finished.returncode:
        last = "\n".join((finished.stderr or finished.stdout).strip().splitlines()[-5:])
        raise ToolchainError(f"pip could not install {', '.join(CUDA_REQUIREMENTS)}:\n{last}", returncode=finished.returncode)


def _publish(staging: Path, prefix: Path) -> None:
    """Put ``staging`` in the place of ``prefix``, unless another process was faster, with the same pinned packages."""
    if not damage(prefix):
        return
    former = staging.with_name("former")
    with _interrupts_held_back():
        with contextlib.suppress(FileNotFoundError):
            prefix.rename(former)
        try:
            staging.rename(prefix)
        except OSError:
            with contextlib.suppress(OSError):
                former.rename(prefix)
            if damage(prefix):
                raise


def damage(prefix: Path) -> str:
    """Return what keeps ``prefix`` from being the pinned toolkit as pip installs it, or "" if nothing does; reads all of it."""
    if not prefix.is_dir():
        return f"{prefix} is not there"
    packages = _packages(prefix)
    for name in (*_CONTENT_PACKAGES, *_OTHER_PACKAGES):
        if name not in packages:
            return f"{prefix} lacks {name}"
        if damaged := damaged_files(packages[name]):
            return f"{prefix / damaged[0]} is missing, or not as it was installed"
    try:
        root = _pinned_root(prefix)
        _require_parts(root)
        release = _release(root)
    except ToolchainError as exc:
        return exc.message
    is_pinned = release.rpartition(".")[0] == CUDA_VERSION.rpartition(".")[0]
    return "" if is_pinned else f"{root} is CUDA {release}"


def _packages(prefix: Path) -> dict[str, importlib.metadata.Distribution]:
    return {str(dist.metadata["Name"]).lower(): dist for dist in importlib.metadata.distributions(path=[str(prefix)])}


def find(cuda_home: str | Path | None = None, *, host_compiler: str | Path | None = None) -> Toolchain:
    """Return the toolkit at ``cuda_home``, or the pinned one that ``install`` made, after checking that its parts fit.

    PATH is not searched for CUDA tools: nvcc, ptxas, cicc and headers come from one root.
    Raises: ToolchainError naming the bad value or part and the command that mends it, WorkFolderError.
    """
    root = _pinned_root(default_prefix()) if cuda_home is None else _checked_root(str(cuda_home))
    host = _host_compiler(host_compiler)
    _require_parts(root)
    # Each thread asks a process for its version; what it answers goes through a temporary file.
    with full_disk_told(temp_dir()), ThreadPoolExecutor(2) as pool:
        asked, asked_host = pool.submit(_release, root), pool.submit(_host_release, host)
        digests = _digests(root)
        release, host_release = asked.result(), asked_host.result()
    major, minor = release.split(".")[:2]
    return Toolchain(root, host, (int(major), int(minor)), release, host_release, digests)


def _pinned_root(prefix: Path) -> Path:
    roots = sorted(prefix.glob("nvidia/cu*"))
    if not roots:
        raise ToolchainError(f"the CUDA toolkit {CUDA_VERSION} is not at {prefix}; run `{INSTALL_COMMAND}`", prefix=str(prefix))
    return roots[-1]


def _checked_root(text: str) -> Path:
    """Check a value that a user or an environment variable gave: one folder, nothing else."""
    problem = ""
    if not text.strip():
        problem = "it is empty"
    elif os.pathsep in text:
        problem = f"it is a list of paths (it contains {os.pathsep!r}); give one folder"
    elif not Path(text).is_dir():
        problem = "it is a dangling link" if Path(text).is_symlink() else "there is no such folder"
    if problem:
        raise ToolchainError(
            f"--cuda-home (TKBUILD_CUDA_HOME) {text!r} is no CUDA toolkit: {problem}; give the folder that has bin/nvcc, or leave it out and run `{INSTALL_COMMAND}`",
            value=text,
        )
    root = Path(text).absolute()
    # A pip prefix holds the toolkit one level deeper; both spellings are understood.
    nested = sorted(root.glob("nvidia/cu*"))
    return nested[-1] if nested and not (root / "bin/nvcc").exists() else root


def _require_parts(root: Path) -> None:
    missing = [part for part in (*_COMPILER_FILES[:-1], "include/cuda.h", "include/cuda_runtime.h") if not (root / part).is_file()]
    missing += [f"{part} (not executable)" for part in _TOOLS if part not in missing and not os.access(root / part, os.X_OK)]
    if missing:
        raise ToolchainError(
            f"the CUDA toolkit at {root} lacks {', '.join(missing)}; run `{INSTALL_COMMAND}` or give another --cuda-home",
            missing=missing,
        )


def _release(root: Path) -> str:
    """Return the release of the toolkit. Raises: ToolchainError if compiler, assembler and headers are of different ones."""
    nvcc, ptxas = (_tool_release(root / "bin" / tool) for tool in ("nvcc", "ptxas"))
    header = _header_version(root / "include/cuda.h")
    versions = {"nvcc": nvcc.rsplit(".", 1)[0], "ptxas": ptxas.rsplit(".", 1)[0], "cuda.h": header}
    if len(set(versions.values())) > 1:
        listed = ", ".join(f"{part} {version}" for part, version in versions.items())
        raise ToolchainError(
            f"the parts of the CUDA toolkit at {root} are of different versions: {listed}; run `{INSTALL_COMMAND}`",
            versions=versions,
        )
    return nvcc


def _tool_release(tool: Path) -> str:
    try:
        finished = run([tool, "--version"], timeout_s=_VERSION_TIMEOUT_S)
    except StepTimeoutError as exc:
        raise ToolchainError(
            f"{tool} does not tell its version within {_VERSION_TIMEOUT_S:g} s; run `{INSTALL_COMMAND}`", tool=str(tool)
        ) from exc
    match = re.search(r"release \d+\.\d+, V(\d+\.\d+\.\d+)", finished.stdout)
    if finished.returncode or match is None:
        raise ToolchainError(
            f"{tool} does not tell its version: {(finished.stderr or finished.stdout).strip()[:200]!r}; run `{INSTALL_COMMAND}`",
            tool=str(tool),
        )
    return match.group(1)


def _header_version(header: Path) -> str:
    match = re.search(r"#define CUDA_VERSION (\d+)", header.read_text(errors="replace"))
    if match is None:
        raise ToolchainError(f"{header} does not define CUDA_VERSION; run `{INSTALL_COMMAND}`", header=str(header))
    return f"{int(match.group(1)) // 1000}.{int(match.group(1)) % 1000 // 10}"


def _host_compiler(given: str | Path | None) -> Path:
    found = shutil.which(str(given)) if given is not None else shutil.which("g++", path=os.pathsep.join(_absolute_path_entries()))
    if found is None:
        raise ToolchainError(
            f"nvcc needs a host compiler, and {given or 'g++'} was not found; install it (Debian, Ubuntu: apt-get install g++) "
            "and let PATH have its folder",
            tool=str(given or "g++"),
        )
    return Path(found).absolute()


def _host_release(compiler: Path) -> str:
    finished = run([compiler, "-dumpfullversion"], timeout_s=_VERSION_TIMEOUT_S)
    if finished.returncode:
        raise ToolchainError(f"{compiler} does not work: {finished.stderr.strip()[:200]!r}", tool=str(compiler))
    return " ".join(finished.stdout.split())


def _digests(root: Path) -> dict[str, str]:
    """Digest a toolkit that pip installed by its packages, so that it has one identity everywhere; any other by its files."""
    found = _packages(root.parent.parent)
    if any(name not in found for name in _CONTENT_PACKAGES):
        return _file_digests(root)
    try:
        return {name: package_digest(found[name]) for name in _CONTENT_PACKAGES}
    except IntegrityError as exc:
        raise ToolchainError(
            f"the CUDA toolkit at {root} is damaged: {exc.message}; for the pinned one, run `{INSTALL_COMMAND}`"
        ) from exc


def _file_digests(root: Path) -> dict[str, str]:
    compiler = {name: file_digest(root / name) for name in _COMPILER_FILES if (root / name).is_file()}
    headers = sorted(path.relative_to(root).as_posix() for path in (root / "include").rglob("*") if path.is_file())
    return {"compiler": key_digest(1, compiler), "headers": files_digest(root, headers)}


@dataclass(frozen=True)
class TileLangPackage:
    """The installed TileLang, found without importing it. digest: its whole content; headers_digest: what nvcc reads."""

    version: str
    digest: str
    headers_digest: str
    include_dirs: tuple[Path, ...]


def find_tilelang() -> TileLangPackage:
    """Return the installed TileLang. Raises: ToolchainError if it is missing or of another version than the pinned one."""
    try:
        distribution = importlib.metadata.distribution("tilelang")
    except importlib.metadata.PackageNotFoundError as exc:
        raise ToolchainError("tilelang is not installed; run `pip install 'tkbuild[compile]'`", package="tilelang") from exc
    if distribution.version != TILELANG_VERSION:
        raise ToolchainError(
            f"tilelang {distribution.version} is installed, tkbuild needs {TILELANG_VERSION}; "
            f"run `pip install tilelang=={TILELANG_VERSION}`",
            package="tilelang",
        )
    include = ("tilelang/src", "tilelang/3rdparty/cutlass/include")
    entries = package_entries(distribution)
    headers = entries_digest(entries, ("tilelang/src/tl_templates/", include[1] + "/"))
    dirs = tuple(Path(str(distribution.locate_file(path))) for path in include)
    return TileLangPackage(distribution.version, entries_digest(entries), headers, dirs)

"""CUDA source -> PTX with headers parsed once for many kernels: nvcc's own steps, its front end forked after the headers.

Most of nvcc's time goes into parsing the same headers for each kernel. ``HeaderServer`` runs cicc, with the command
line that nvcc would use, up to the end of the headers, and forks it there for each kernel (forkserver.c). The result is
what the steps make one after the other, bit for bit; whatever does not fit raises ``CannotFork``, and the caller runs them.
"""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tkbuild.errors import ToolchainError
from tkbuild.forking import ForkClient, ServerEndedError, start_server
from tkbuild.toolchain import ProcessGroups, run

SOURCE_NAME = "kernel.cu"
_PREPROCESSED, _PTX, _CUBIN = "kernel.cpp1.ii", "kernel.ptx", "kernel.cubin"
_FORK_SERVER_SOURCE = Path(__file__).with_name("forkserver.c")
_START_TIMEOUT_S = 120.0
# Text after the headers that would see something else when it is preprocessed apart from them.
_NEEDS_WHOLE_FILE = re.compile(r"^\s*#\s*(include|import|pragma\s+(push|pop)_macro)|__COUNTER__|__INCLUDE_LEVEL__", re.MULTILINE)


class CannotFork(Exception):  # noqa: N818 - an answer to the caller, who then runs the plain steps; never shown
    """This source, compiler or host does not allow the headers to be parsed apart."""


@dataclass(frozen=True)
class NvccSteps:
    """The three commands nvcc runs for one source; each reads and writes fixed names in its folder."""

    preprocess: tuple[str, ...]
    front_end: tuple[str, ...]
    assemble: tuple[str, ...]


def nvcc_steps(dryrun: str) -> NvccSteps:
    """Parse what ``nvcc --dryrun --keep --keep-dir .`` wrote. Raises: ToolchainError if it is not exactly these three steps.

    The path of the source becomes its bare name: cicc derives names of internal variables from it.
    """
    variables: dict[str, str] = {}
    commands: list[tuple[str, ...]] = []
    for line in dryrun.splitlines():
        text = line.removeprefix("#$ ")
        if assignment := re.match(r"([A-Za-z_]+)=(.*)", text):
            variables[assignment.group(1)] = assignment.group(2)
        elif text.strip():
            words = shlex.split(re.sub(r"\$(\w+)", lambda match: variables.get(match.group(1), ""), text))
            commands.append(tuple(SOURCE_NAME if word.endswith(f"/{SOURCE_NAME}") else word.removeprefix("./") for word in words))
    expected = ((SOURCE_NAME, _PREPROCESSED), (_PREPROCESSED, _PTX), (_PTX, _CUBIN))
    is_known = len(commands) == len(expected) and all(
        command[-1] == output and source in command for command, (source, output) in zip(commands, expected, strict=True)
    )
    if not is_known:
        raise ToolchainError(f"this nvcc does not preprocess, run cicc and ptxas as expected:\n{dryrun}", dryrun=dryrun)
    return NvccSteps(*commands)


def split_headers(source: str) -> tuple[str, str]:
    """Return the leading preprocessor lines of ``source``, and the rest. Raises: CannotFork if they cannot be taken apart."""
    lines = source.splitlines(keepends=True)
    count, depth, continues = 0, 0, False
    for line in lines:
        text = line.strip()
        if not continues and text and not text.startswith(("#", "//")):
            break
        depth += bool(re.match(r"#\s*if", text)) - bool(re.match(r"#\s*endif", text))
        continues = text.endswith("\\")
        count += 1
    headers, body = "".join(lines[:count]), "".join(lines[count:])
    if depth or continues or "#include" not in headers or not body:
        raise CannotFork("the source does not begin with its includes")
    if _NEEDS_WHOLE_FILE.search(body):
        raise CannotFork("the source depends on more than macros of its headers")
    return headers, body


def build_fork_server(folder: Path, compiler: Path, env: Mapping[str, str], groups: ProcessGroups) -> Path:
    """Compile forkserver.c into ``folder``. Raises: CannotFork where that does not work (no Linux, no glibc)."""
    library = folder / "forkserver.so"
    command: list[str | Path] = [compiler, "-x", "c", "-O1", "-shared", "-fPIC", "-o", library, _FORK_SERVER_SOURCE, "-ldl"]
    finished = run(command, timeout_s=_START_TIMEOUT_S, cwd=folder, env=env, groups=groups)
    if finished.returncode:
        raise CannotFork(f"the fork server does not compile: {finished.stderr[-200:]}")
    return library


class HeaderServer:
    """A front end that has parsed one set of headers. Threads may call ``ptx`` at the same time.

    folder: private to the server.  Raises: CannotFork from the constructor if the headers do not compile.
    """

    def __init__(
        self, steps: NvccSteps, headers: str, folder: Path, library: Path, env: Mapping[str, str], groups: ProcessGroups
    ) -> None:
        self._steps, self._folder, self._env, self._groups = steps, folder, env, groups
        self._first_body_line = headers.count("\n") + 1
        self._write_inputs(headers)
        try:
            self._client = ForkClient(self._start(library), groups, ready_timeout_s=_START_TIMEOUT_S)
        except ServerEndedError as exc:
            raise CannotFork(f"the headers do not compile, or this cicc cannot be forked: {exc}") from exc

    def _write_inputs(self, headers: str) -> None:
        (self._folder / SOURCE_NAME).write_text(headers)
        self._preprocess((*self._steps.preprocess, "-dD"), self._folder, "all.ii")
        text, macros = take_out_macros((self._folder / "all.ii").read_bytes())
        (self._folder / "headers.ii").write_bytes(text)
        (self._folder / "macros.h").write_bytes(macros)
        (self._folder / _PREPROCESSED).write_text('#include "headers.ii"\n#include "body.ii"\n')
        (self._folder / "body.ii").touch()

    def _preprocess(self, command: Sequence[str], folder: Path, output: str) -> None:
        words = [output if word == _PREPROCESSED else word for word in command]
        finished = run(words, timeout_s=_START_TIMEOUT_S, cwd=folder, env=self._env, groups=self._groups)
        if finished.returncode:
            raise CannotFork(finished.stderr[-200:])

    def _start(self, library: Path) -> subprocess.Popen[str]:
        env = {
            **self._env,
            "LD_PRELOAD": str(library),
            "TKBUILD_FORK_AT": str(self._folder / "body.ii"),
            "TMPDIR": str(self._folder),
        }
        return start_server(self._groups, self._steps.front_end, self._folder, env, self._folder / "log")

    def ptx(self, body: str, folder: Path, timeout_s: float) -> str:
        """Compile ``body``, the source after the headers, to ``kernel.ptx`` in its private ``folder``; return the diagnostics.

        Raises: CannotFork if it does not compile (the plain steps then tell why), StepTimeoutError.
        """
        self._preprocess_body(body, folder)
        try:
            status = self._client.run(folder, timeout_s, "cicc")
        except ServerEndedError as exc:
            raise CannotFork(str(exc)) from exc
        if status != 0:
            raise CannotFork(f"cicc ended with status {status}")
        return (folder / "log").read_text(errors="replace")

    def _preprocess_body(self, body: str, folder: Path) -> None:
        # The line marker gives lines and file the names they have in the whole source.
        (folder / "body.cu").write_text(f'# {self._first_body_line} "{SOURCE_NAME}"\n{body}')
        command = ["body.cu" if word == SOURCE_NAME else word for word in _without_forced_include(self._steps.preprocess)]
        self._preprocess([command[0], "-imacros", str(self._folder / "macros.h"), *command[1:]], folder, "body.ii")

    def close(self) -> None:
        """End the front end."""
        self._client.close()


def take_out_macros(preprocessed: bytes) -> tuple[bytes, bytes]:
    """Split what ``-E -dD`` wrote into the text, every line in its place, and the definitions, in order."""
    lines = preprocessed.split(b"\n")
    is_macro = [line.startswith((b"#define ", b"#undef ")) for line in lines]
    text = b"\n".join(b"" if macro else line for line, macro in zip(lines, is_macro, strict=True))
    return text, b"\n".join(line for line, macro in zip(lines, is_macro, strict=True) if macro) + b"\n"


def _without_forced_include(command: Sequence[str]) -> list[str]:
    """Leave out ``-include FILE``: the headers hold it already."""
    place = command.index("-include") if "-include" in command else len(command)
    return [*command[:place], *command[place + 2 :]]

"""``doctor``: every part a build or a launch needs, what is wrong with it, and the command that mends it."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import click

from tkbuild import toolchain
from tkbuild.arch import TargetArch
from tkbuild.cli import emit_json
from tkbuild.cli.options import json_option
from tkbuild.errors import TkbuildError, ToolchainError
from tkbuild.workfolder import work_folder

DEFAULT_ARCHS = ("sm_90a", "sm_100a")
_PROBE = 'extern "C" __global__ void probe(int *out) {\n  *out = 7;\n}\n'
_PROBE_TIMEOUT_S = 120.0


@dataclass(frozen=True)
class Finding:
    """One thing looked at."""

    what: str
    ok: bool
    found: str


@click.command("doctor")
@click.option(
    "--install-toolchain",
    is_flag=True,
    help="Install the pinned CUDA toolkit by pip, into a folder of its own, if it is not there or damaged.",
)
@click.option("--cuda-home", envvar="TKBUILD_CUDA_HOME", help="Look at this CUDA toolkit instead of the pinned one.")
@click.option("--arch", "archs", multiple=True, default=DEFAULT_ARCHS, show_default=True, help="Targets to try a compile for.")
@click.option("--device/--no-device", default=True, help="Also look at driver, devices and installed kernel wheels.")
@json_option
def doctor_command(install_toolchain: bool, cuda_home: str | None, archs: tuple[str, ...], device: bool, as_json: bool) -> None:
    """Name what is missing or mismatched, and the command that mends it."""
    if install_toolchain:
        toolchain.install(tell=lambda text: click.echo(text, err=True))
    findings = build_side(cuda_home, archs)
    if device:
        findings += serving_side()
    for finding in findings:
        if as_json:
            emit_json(asdict(finding))
        else:
            click.echo(f"{'ok  ' if finding.ok else 'FAIL'}  {finding.what}: {finding.found}")
    wrong = [finding.what for finding in findings if not finding.ok]
    if wrong:
        raise ToolchainError(f"{len(wrong)} of {len(findings)} checks failed: {', '.join(wrong)}", failed=wrong)


def build_side(cuda_home: str | None, archs: tuple[str, ...]) -> list[Finding]:
    """Return a finding each on TileLang, the CUDA toolkit, the host compiler, and a small compile for every arch."""
    found: list[toolchain.Toolchain] = []

    def cuda() -> str:
        found.append(toolchain.find(cuda_home))
        return f"{found[0].release} at {found[0].root}, nvcc, ptxas, cicc, cudafe++ and headers agree; g++ {found[0].host_release}"

    findings = [
        _look("python", lambda: sys.version.split()[0]),
        _look("tilelang", lambda: toolchain.find_tilelang().version),
        _look("CUDA toolkit", cuda),
    ]
    return findings + [_look(f"compile for {arch}", lambda arch=arch: _probe(found[0], arch)) for arch in archs if found]  # type: ignore[misc]


def _probe(parts: toolchain.Toolchain, arch: str) -> str:
    """Compile a kernel of three lines."""
    target = TargetArch.parse(arch)
    parts.require(target)
    with work_folder() as folder:
        source = folder / "probe.cu"
        source.write_text(_PROBE)
        command: list[str | Path] = [
            parts.nvcc,
            "--cubin",
            "-std=c++20",
            f"-gencode=arch={target.compute},code={target}",
            "-ccbin",
            parts.host_compiler,
            "-o",
            "probe.cubin",
            "probe.cu",
        ]
        finished = toolchain.run(command, timeout_s=_PROBE_TIMEOUT_S, cwd=folder, env=parts.environment(folder))
        if finished.returncode:
            raise ToolchainError(f"nvcc failed: {finished.stderr.strip()[-400:]}; run `tkbuild doctor --install-toolchain`")
        return f"works, {(folder / 'probe.cubin').stat().st_size} bytes"


def serving_side() -> list[Finding]:
    """Return what the runtime finds: driver, devices, launcher, kernel wheels."""
    if importlib.util.find_spec("torch") is None:
        return [Finding("torch", False, "not installed; pip install 'torch>=2.10'")]
    from tkbuild.runtime import health

    return [Finding(f.what, f.ok, f.found + (f"; {f.mend}" if f.mend else "")) for f in health.examine()]


def _look(what: str, ask: Callable[[], str]) -> Finding:
    try:
        return Finding(what, True, ask())
    except TkbuildError as exc:
        return Finding(what, False, str(exc))

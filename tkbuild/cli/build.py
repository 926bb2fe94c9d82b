"""``compile``, ``package``, ``gc`` and ``clean``: what fills the store, makes wheels of it, and empties it."""

from __future__ import annotations

import math
import re
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import click

from tkbuild import toolchain
from tkbuild.build import STEP_TIMEOUT_S, BuildEvent, BuildFailure, BuildOptions, BuildResult, build
from tkbuild.checks import KernelChecks
from tkbuild.cli import emit_json
from tkbuild.cli.options import (
    json_option,
    selected,
    selection_options,
    specs_option,
    store_option,
)
from tkbuild.errors import ArgumentError, CompileError, PackageError, TkbuildError
from tkbuild.plan import BuildPlan, build_facts, make_plan, make_requests, shard
from tkbuild.remote_store import open_store
from tkbuild.render import RENDER_TIMEOUT_S, Renderer
from tkbuild.specs import load_specs
from tkbuild.stored import load_built, needed_keys
from tkbuild.variants import Variant, select
from tkbuild.versions import TKBUILD_VERSION
from tkbuild.wheel import DEFAULT_MAX_BYTES, DEFAULT_NAME, PackagedVariant, WheelRequest, load_verified, write_wheel

VERIFIED_FOLDER = "verified"
_SHARD = re.compile(r"([1-9][0-9]{0,5})/([1-9][0-9]{0,5})")
_BAR_WIDTH = 24
# Plain lines tell of lowered kernels no more often than this.
_QUIET_S = 10.0

cuda_home_option = click.option("--cuda-home", envvar="TKBUILD_CUDA_HOME", help="CUDA toolkit to use instead of the pinned one.")
remote_option = click.option(
    "--remote", envvar="TKBUILD_REMOTE", help="URL of a shared store: asked on a miss, given what is built."
)


@click.command("compile")
@selection_options
@store_option
@remote_option
@cuda_home_option
@click.option("-j", "--jobs", type=int, help="Steps at once; default: as cores and memory allow.")
@click.option("--timeout", default=STEP_TIMEOUT_S, show_default=True, help="Seconds that one step of one kernel may take.")
@click.option("--shard", "shard_text", metavar="I/N", help="Build part I of N; all parts together are the whole.")
@json_option
def compile_command(
    patterns: tuple[str, ...],
    specs_dir: Path,
    profile: str,
    archs: tuple[str, ...],
    store: str,
    remote: str | None,
    cuda_home: str | None,
    jobs: int | None,
    timeout: float,
    shard_text: str | None,
    as_json: bool,
) -> None:
    """Compile what the store lacks of the selected variants; needs no GPU."""
    options = BuildOptions(jobs=jobs, step_timeout_s=timeout)
    part = None if shard_text is None else _parse_shard(shard_text)
    renderer = Renderer(timeout_s=min(timeout, RENDER_TIMEOUT_S))
    _variants, plan, parts, tilelang = plan_build(lambda: selected(patterns, specs_dir, profile, archs), cuda_home, renderer)
    if part is not None:
        plan = shard(plan, *part)
    result = build(plan, open_store(store, remote), parts, tilelang, options, on_event=_reporter(as_json))
    _summarise(result, as_json)


def plan_build(
    choose: Callable[[], list[Variant]], cuda_home: str | None, renderer: Renderer | None = None
) -> tuple[list[Variant], BuildPlan, toolchain.Toolchain, toolchain.TileLangPackage]:
    """Choose and render variants while another thread asks the tools for their versions."""
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(lambda: (toolchain.find(cuda_home), toolchain.find_tilelang()))
        variants = choose()
        requests = make_requests(variants, renderer)
        parts, tilelang = asked.result()
    return variants, make_plan(requests, build_facts(parts, tilelang)), parts, tilelang


def _parse_shard(text: str) -> tuple[int, int]:
    match = _SHARD.fullmatch(text)
    if match is None:
        raise ArgumentError(f"--shard {text!r}: expected I/N of at most six digits each, such as 1/4", shard=text)
    return int(match[1]), int(match[2])


def _reporter(as_json: bool) -> Callable[[BuildEvent], None]:
    """JSON lines, a progress bar on a terminal, or plain lines for what was not in the store."""
    if as_json:
        return lambda event: emit_json(event.to_json())
    return _show_bar if sys.stderr.isatty() else PlainReporter()


class PlainReporter:
    """Writes a line when lowering begins, for each variant that is compiled or failed, and while only lowering goes on.

    now: seconds of a clock that never goes back.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._spoke_at: float | None = None
        self._lowered = 0

    def __call__(self, event: BuildEvent) -> None:
        """Write what the event is worth."""
        if event.kind == "started" and self._spoke_at is None:
            self._say(event, f"{event.total - event.finished} variants are not in the store; lowering begins")
        elif event.kind == "lowered":
            self._lowered += len(event.variants)
            if self._spoke_at is not None and self._now() - self._spoke_at >= _QUIET_S:
                self._say(event, f"lowered {self._lowered} variants")
        elif event.kind in ("compiled", "failed"):
            self._say(event, f"{event.kind} {' '.join(event.variants)} ({event.elapsed_s:.1f} s)")

    def _say(self, event: BuildEvent, text: str) -> None:
        self._spoke_at = self._now()
        click.echo(f"[{event.finished}/{event.total}] {text}", err=True)


def _show_bar(event: BuildEvent) -> None:
    if event.kind == "failed":
        click.echo(f"\r\033[Kfailed {' '.join(event.variants)}", err=True)
    filled = _BAR_WIDTH * event.finished // max(1, event.total)
    what = event.variants[0] if event.variants else ""
    end = "\n" if event.kind == "done" else ""
    click.echo(
        f"\r\033[K[{'#' * filled}{'.' * (_BAR_WIDTH - filled)}] {event.finished}/{event.total} {event.kind} {what}"[:160] + end,
        err=True,
        nl=False,
    )


def _summarise(result: BuildResult, as_json: bool) -> None:
    for failure in result.failures:
        _show_failure(failure, as_json)
    if not as_json:
        click.echo(
            f"{len(result.built)} variants ready, {result.hits} of them from the store; {result.lowered} lowered, "
            f"{result.compiled} compiled, {len(result.failures)} failed in {result.elapsed_s:.1f} s"
        )
    if result.failures:
        kinds = {type(failure.error) for failure in result.failures}
        kind = kinds.pop() if len(kinds) == 1 else CompileError
        raise kind(f"{len(result.failures)} variants were not built; see above", variants=[f.variant for f in result.failures])


def _show_failure(failure: BuildFailure, as_json: bool) -> None:
    if as_json:
        emit_json({"variant": failure.variant, "stage": failure.stage, "elapsed_s": failure.elapsed_s, "error": str(failure.error)})
    else:
        click.echo(f"{failure.variant}: {failure.stage} failed after {failure.elapsed_s:.1f} s: {failure.error}", err=True)


@click.command("package")
@selection_options
@store_option
@remote_option
@cuda_home_option
@click.option("--out", type=click.Path(path_type=Path), default=Path("dist"), show_default=True, help="Folder for the wheels.")
@click.option("--name", default=DEFAULT_NAME, show_default=True, help="Distribution name; the arch is appended.")
@click.option("--version", "version", default=TKBUILD_VERSION, show_default=True, help="Version of the wheels.")
@click.option("--max-bytes", default=DEFAULT_MAX_BYTES, show_default=True, help="Size budget of a wheel.")
@json_option
def package_command(
    patterns: tuple[str, ...],
    specs_dir: Path,
    profile: str,
    archs: tuple[str, ...],
    store: str,
    remote: str | None,
    cuda_home: str | None,
    out: Path,
    name: str,
    version: str,
    max_bytes: int,
    as_json: bool,
) -> None:
    """Write one wheel per arch from the store; a variant that is not built is an error, never left out."""
    variants, plan, parts, tilelang = plan_build(lambda: selected(patterns, specs_dir, profile, archs), cuda_home)
    misfits: dict[str, TkbuildError] = {}
    built = load_built(plan, open_store(store, remote), misfits.__setitem__)
    if missing := [variant.id for variant in variants if variant.id not in built]:
        shown = ", ".join(f"{one} ({misfits[one]})" if one in misfits else one for one in missing[:8]) + (
            f" and {len(missing) - 8} more" if len(missing) > 8 else ""
        )
        raise PackageError(
            f"{len(missing)} of {len(variants)} variants are not in the store, or do not fit their spec: {shown}; run `tkbuild compile`",
            missing=missing,
        )
    requests = []
    for arch in sorted({variant.arch for variant in variants}):
        mine = [variant for variant in variants if variant.arch == arch]
        requests.append(
            WheelRequest(
                arch=arch,
                version=version,
                wanted=[variant.id for variant in mine],
                variants=[PackagedVariant.of(built[variant.id]) for variant in mine],
                toolchain={"cuda": parts.release, "tilelang": tilelang.version, "host compiler": parts.host_release},
                checks={v.kernel: KernelChecks(v.spec.reference, v.spec.verify, v.spec.bench).to_json() for v in mine},
                verified=load_verified(specs_dir / VERIFIED_FOLDER / f"{arch}.json", arch),
                profiles={profile: [variant.id for variant in mine]},
                name=name,
                max_bytes=max_bytes,
            )
        )
    for path in [write_wheel(request, out) for request in requests]:
        size = path.stat().st_size
        if as_json:
            emit_json({"wheel": str(path), "bytes": size})
        else:
            click.echo(f"{path}  {size} bytes")


@click.command("gc")
@specs_option
@store_option
@cuda_home_option
@click.option("--older-than-days", type=float, help="Remove only entries stored longer ago than this.")
@click.option("--max-bytes", type=int, help="Remove the oldest entries until the store is no larger.")
@json_option
def gc_command(
    specs_dir: Path, store: str, cuda_home: str | None, older_than_days: float | None, max_bytes: int | None, as_json: bool
) -> None:
    """Remove from the store what no variant of the present specs needs."""
    if older_than_days is not None and not 0 <= older_than_days < math.inf:
        raise ArgumentError(f"--older-than-days {older_than_days}: expected a number from 0", older_than_days=older_than_days)
    if max_bytes is not None and max_bytes < 0:
        raise ArgumentError(f"--max-bytes {max_bytes}: expected 0 or more", max_bytes=max_bytes)
    opened = open_store(store)
    _variants, plan, _parts, _tilelang = plan_build(lambda: select(load_specs(specs_dir)), cuda_home)
    seconds = None if older_than_days is None else older_than_days * 86400
    removed = opened.gc(keep=needed_keys(plan, opened), older_than_s=seconds, max_bytes=max_bytes)
    _say_removed(len(removed), sum(entry.bytes for entry in removed), as_json)


@click.command("clean")
@store_option
@json_option
def clean_command(store: str, as_json: bool) -> None:
    """Empty the store."""
    opened = open_store(store)
    entries = list(opened.entries())
    opened.clean()
    _say_removed(len(entries), sum(entry.bytes for entry in entries), as_json)


def _say_removed(count: int, size: int, as_json: bool) -> None:
    if as_json:
        emit_json({"removed": count, "bytes": size})
    else:
        click.echo(f"{count} entries removed, {size} bytes")

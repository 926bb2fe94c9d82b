"""``package``, ``gc`` and ``clean``: what makes wheels of the store, and empties it."""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import click

from tkbuild import toolchain
from tkbuild.checks import KernelChecks
from tkbuild.cli import emit_json
from tkbuild.cli.options import cuda_home_option, json_option, remote_option, selection_options, specs_option, store_option
from tkbuild.cli.selection import selected
from tkbuild.errors import ArgumentError, PackageError, TkbuildError
from tkbuild.facts import build_facts
from tkbuild.memo import plans_of
from tkbuild.plan import BuildPlan, make_plan, make_requests
from tkbuild.remote_store import open_store
from tkbuild.specs import load_profiles, load_specs
from tkbuild.stored import load_built, needed_keys
from tkbuild.variants import Variant, select
from tkbuild.versions import TKBUILD_VERSION
from tkbuild.wheel import DEFAULT_MAX_BYTES, DEFAULT_NAME, PackagedVariant, WheelRequest, load_verified, write_wheel

VERIFIED_FOLDER = "verified"
#: Of wheels that hold a part of a profile: before the whole one in every order of versions.
PARTIAL_VERSION = f"{TKBUILD_VERSION}.dev0+partial"


def plan_build(
    choose: Callable[[], list[Variant]], cuda_home: str | None
) -> tuple[list[Variant], BuildPlan, toolchain.Toolchain, toolchain.TileLangPackage]:
    """Choose and render variants while another thread asks the tools for their versions."""
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(lambda: (toolchain.find(cuda_home), toolchain.find_tilelang()))
        variants = choose()
        requests = make_requests(variants)
        parts, tilelang = asked.result()
    return variants, make_plan(requests, build_facts(parts, tilelang)), parts, tilelang


@click.command("package")
@selection_options
@store_option
@remote_option
@cuda_home_option
@click.option("--out", type=click.Path(path_type=Path), help="Folder for the wheels.  [default: dist, with patterns dist/partial]")
@click.option("--name", help=f"Distribution name; the arch is appended.  [default: `wheel` of the profile, else {DEFAULT_NAME}]")
@click.option("--version", help=f"Version of the wheels.  [default: {TKBUILD_VERSION}, with patterns {PARTIAL_VERSION}]")
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
    out: Path | None,
    name: str | None,
    version: str | None,
    max_bytes: int,
    as_json: bool,
) -> None:
    """Write one wheel per arch from the store; a variant that is not built is an error, never left out.

    With patterns the wheels hold a part of the profile, and do not answer for it; installers take a whole wheel before them.
    """
    folder = out or Path("dist/partial" if patterns else "dist")
    variants, plan, parts, tilelang = plan_build(lambda: selected(patterns, specs_dir, profile, archs), cuda_home)
    misfits: dict[str, TkbuildError] = {}
    built = load_built(plan, open_store(store, remote), misfits.__setitem__)
    if missing := [variant.id for variant in variants if variant.id not in built]:
        shown = ", ".join(f"{one} ({misfits[one]})" if one in misfits else one for one in missing[:8]) + (
            f" and {len(missing) - 8} more" if len(missing) > 8 else ""
        )
        raise PackageError(
            f"{len(missing)} of {len(variants)} variants are not in the store{f' nor behind {remote}' if remote else ''}, "
            f"or do not fit their spec: {shown}; run `tkbuild compile`",
            missing=missing,
        )
    wheel_name = name or load_profiles(specs_dir)[profile].wheel or DEFAULT_NAME
    requests = []
    for arch in sorted({variant.arch for variant in variants}):
        mine = [variant for variant in variants if variant.arch == arch]
        requests.append(
            WheelRequest(
                arch=arch,
                version=version or (PARTIAL_VERSION if patterns else TKBUILD_VERSION),
                wanted=[variant.id for variant in mine],
                variants=[PackagedVariant.of(built[variant.id]) for variant in mine],
                toolchain={"cuda": parts.release, "tilelang": tilelang.version, "host compiler": parts.host_release},
                checks={v.kernel: KernelChecks(v.spec.reference, v.spec.verify, v.spec.bench).to_json() for v in mine},
                verified=load_verified(specs_dir / VERIFIED_FOLDER / f"{arch}.json", arch),
                profiles={} if patterns else {profile: [variant.id for variant in mine]},
                name=wheel_name,
                max_bytes=max_bytes,
            )
        )
    for path in [write_wheel(request, folder) for request in requests]:
        size = path.stat().st_size
        if as_json:
            emit_json({"wheel": str(path), "bytes": size})
        else:
            click.echo(f"{path}  {size} bytes")


@click.command("gc")
@specs_option
@store_option
@cuda_home_option
@click.option("--older-than-days", type=float, help="Only entries stored longer ago than this.")
@click.option("--max-bytes", type=int, help="Only as many, the oldest first, as make the store no larger; what is needed stays.")
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
    needed = needed_keys(plan, opened)
    removed = opened.gc(keep=needed | plans_of(opened, needed), older_than_s=seconds, max_bytes=max_bytes)
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

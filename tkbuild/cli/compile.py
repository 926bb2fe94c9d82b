"""``compile``: fills the store. What plans and builds is imported only if something may have changed."""

from __future__ import annotations

import importlib
import re
import time
from pathlib import Path

import click

from tkbuild import toolchain
from tkbuild.build_options import STEP_TIMEOUT_S, BuildOptions
from tkbuild.cli.options import cuda_home_option, json_option, remote_option, selection_options, store_option
from tkbuild.errors import ArgumentError, StoreError
from tkbuild.facts import build_facts
from tkbuild.memo import plan_fields, recall, remember
from tkbuild.remote_store import open_store
from tkbuild.store import Store

_SHARD = re.compile(r"([1-9][0-9]{0,5})/([1-9][0-9]{0,5})")


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
    started = time.perf_counter()
    options = BuildOptions(jobs=jobs, step_timeout_s=timeout)
    part = None if shard_text is None else _parse_shard(shard_text)
    opened = open_store(store, remote, shares=True)
    parts, tilelang = toolchain.find(cuda_home), toolchain.find_tilelang()
    facts = build_facts(parts, tilelang)
    choice = {"patterns": list(patterns), "profile": profile, "archs": list(archs), "shard": part}
    fields = plan_fields(specs_dir, choice, facts, opened)
    ready = None if as_json or fields is None else recall(opened, fields)  # events name each variant
    if ready is not None:
        seconds = time.perf_counter() - started
        click.echo(f"{ready} variants ready, {ready} of them from the store; 0 lowered, 0 compiled, 0 failed in {seconds:.1f} s")
        _check_shared(opened, part)
        return
    making = importlib.import_module("tkbuild.cli.compiling")
    variants = making.selected(patterns, specs_dir, profile, archs)
    plan = making.planned(variants, facts, timeout, part)
    result = making.build(plan, opened, parts, tilelang, options, on_event=making.reporter(as_json))
    if fields is not None and not result.failures:
        remember(opened, fields, [(built.lower_key, built.compile_key) for built in result.built])
    making.summarise(result, as_json)
    _check_shared(opened, part)


def _check_shared(store: Store, part: tuple[int, int] | None) -> None:
    """A cache that is out of reach is no failure; a shard that nobody else can have is."""
    if part is not None and store.remote is not None and store.remote.has_failed:
        raise StoreError(
            f"shard {part[0]}/{part[1]} is built in {store.root}, but not all of it is in the shared store; mend that and run this again",
            store=str(store.root),
        )


def _parse_shard(text: str) -> tuple[int, int]:
    match = _SHARD.fullmatch(text)
    if match is None:
        raise ArgumentError(f"--shard {text!r}: expected I/N of at most six digits each, such as 1/4", shard=text)
    return int(match[1]), int(match[2])

"""``list``, ``explain``, ``inspect`` and ``schema``: questions that change nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from tkbuild.cli import emit_json
from tkbuild.cli.build import VERIFIED_FOLDER, plan_build
from tkbuild.cli.options import cuda_home_option, json_option, selection_options, specs_option, store_option
from tkbuild.cli.selection import selected
from tkbuild.elf import parse_cubin
from tkbuild.errors import TkbuildError
from tkbuild.remote_store import open_store
from tkbuild.render import render
from tkbuild.specs import json_schema, load_specs
from tkbuild.stored import BuiltVariant, explain, load_built
from tkbuild.variants import parse_id
from tkbuild.wheel import PackagedVariant, load_verified, total_resources, verified_state


@click.command("list")
@selection_options
@json_option
def list_command(patterns: tuple[str, ...], specs_dir: Path, profile: str, archs: tuple[str, ...], as_json: bool) -> None:
    """List variants, one line each."""
    for variant in selected(patterns, specs_dir, profile, archs):
        if as_json:
            emit_json({"id": variant.id, "kernel": variant.kernel, "arch": str(variant.arch), "axes": dict(variant.axes)})
        else:
            click.echo(variant.id)


@click.command("explain")
@click.argument("variant_id", metavar="VARIANT")
@specs_option
@store_option
@cuda_home_option
@click.option("--source", is_flag=True, help="Print the rendered template instead.")
@json_option
def explain_command(variant_id: str, specs_dir: Path, store: str, cuda_home: str | None, source: bool, as_json: bool) -> None:
    """Show a variant's key fields, and what changed since its stored build."""
    if source:
        text = render(parse_id(variant_id, load_specs(specs_dir))).text
        if as_json:
            emit_json({"source": text})
        else:
            click.echo(text, nl=False)
        return
    _variants, plan, _parts, _tilelang = plan_build(lambda: [parse_id(variant_id, load_specs(specs_dir))], cuda_home)
    explanation = explain(plan, open_store(store))
    if as_json:
        emit_json(explanation.to_json())
    else:
        click.echo(explanation.text())


@click.command("inspect")
@selection_options
@store_option
@cuda_home_option
@json_option
def inspect_command(
    patterns: tuple[str, ...],
    specs_dir: Path,
    profile: str,
    archs: tuple[str, ...],
    store: str,
    cuda_home: str | None,
    as_json: bool,
) -> None:
    """Show registers, spills, shared memory, size and verified state of built variants."""
    variants, plan, _parts, _tilelang = plan_build(lambda: selected(patterns, specs_dir, profile, archs), cuda_home)
    misfits: dict[str, TkbuildError] = {}
    built = load_built(plan, open_store(store), misfits.__setitem__)
    verified = {
        variant.arch: load_verified(specs_dir / VERIFIED_FOLDER / f"{variant.arch}.json", variant.arch) for variant in variants
    }
    if not as_json:
        click.echo(
            f"{'variant':<56} {'target':<8} {'regs':>5} {'spills':>6} {'stack':>6} {'static':>7} {'dynamic':>8} {'cubin':>8}  state"
        )
    for variant in variants:
        found = built.get(variant.id)
        missing = str(misfits.get(variant.id, "not built; run `tkbuild compile`"))
        row = _row(found, verified[variant.arch]) if found else {"state": missing}
        if as_json:
            emit_json({"id": variant.id, **row})
        else:
            click.echo(_line(variant.id, row))


def _row(built: BuiltVariant, reports: Any) -> dict[str, Any]:
    resources = total_resources(PackagedVariant.of(built))
    state = verified_state(reports.get(built.cubin_sha256))
    return {"target": parse_cubin(built.cubin).arch, **resources, **state, "sha256": built.cubin_sha256}


def _line(variant: str, row: dict[str, Any]) -> str:
    names = ("registers", "spill_bytes", "stack_bytes", "static_smem_bytes", "dynamic_smem_bytes", "cubin_bytes")
    cells = [str(row.get(name, "-")) for name in names]
    widths = (5, 6, 6, 7, 8, 8)
    numbers = " ".join(f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=True))
    return f"{variant:<56} {row.get('target', '-'):<8} {numbers}  {row['state']}"


@click.command("schema")
@json_option
def schema_command(as_json: bool) -> None:
    """Print the JSON Schema of kernel specs, for editors."""
    if as_json:
        emit_json(json_schema())
    else:
        click.echo(json.dumps(json_schema(), indent=2))

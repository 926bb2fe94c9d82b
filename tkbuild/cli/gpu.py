"""``verify`` and ``bench``: installed kernels on a GPU."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click
import torch

from tkbuild.arch import TargetArch
from tkbuild.bench import PEERS, Measurement, bench
from tkbuild.cli import emit_json
from tkbuild.cli.options import json_option, patterns_argument
from tkbuild.errors import ArgumentError, DriverNotFoundError, PatternError, VerifyError
from tkbuild.runtime import api
from tkbuild.runtime.launcher import native
from tkbuild.runtime.registry import InstalledVariant, install_kernels, registry
from tkbuild.verify import VariantReport, verify
from tkbuild.wheel import read_reports

device_option = click.option("--device", default=0, show_default=True, help="CUDA device index.")


@click.command("verify")
@patterns_argument
@device_option
@click.option("--large", is_flag=True, help="Also the cases that need tens of gigabytes.")
@click.option("--seed", type=int, help="Seed of the random data; drawn freshly if not given.")
@click.option("--report", type=click.Path(path_type=Path), help="Folder for <arch>.json, merged with what is there.")
@json_option
def verify_command(
    patterns: tuple[str, ...], device: int, large: bool, seed: int | None, report: Path | None, as_json: bool
) -> None:
    """Run installed kernels on a GPU against their references, on fresh random data."""
    variants = _on_device(patterns, device)
    known = {} if report is None else {arch: _known_reports(report / f"{arch}.json") for arch in {str(v.arch) for v in variants}}
    reports: list[VariantReport] = []

    def show(result: VariantReport) -> None:
        reports.append(result)
        if as_json:
            emit_json(result.to_json())
        else:
            click.echo(verify_line(result))

    try:
        verify(variants, device=torch.device("cuda", device), large=large, seed=seed, on_report=show)
    finally:
        if report is not None:
            _merge_reports(report, known, variants, reports)
    failed = [result.variant for result in reports if not result.is_verified]
    if failed:
        raise VerifyError(f"{len(failed)} of {len(reports)} variants are wrong or did not run: {', '.join(failed)}", failed=failed)
    if not as_json:
        click.echo(f"{len(reports)} variants verified in {sum(r.cases for r in reports)} cases")


def verify_line(result: VariantReport) -> str:
    if result.is_verified:
        return f"{result.variant}  ok, {result.cases} cases"
    if not result.cases:
        return f"{result.variant}  DID NOT RUN: its spec has no reference, or no case that selects it; add one, or try --large"
    first = result.failures[0]
    values = ", ".join(f"{name}={value}" for name, value in first.values.items())
    return f"{result.variant}  WRONG in {len(result.failures)} of {result.cases} cases (seed {result.seed})\n    {values}\n    {first.text}"


def _known_reports(path: Path) -> dict[str, Mapping[str, Any]]:
    """What the report ``path``, named after its arch, says of each cubin. Raises: ArgumentError for another kind of file."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return read_reports(path, TargetArch.parse(path.stem))
    except (OSError, ValueError) as exc:
        raise ArgumentError(
            f"{path} is no report of `tkbuild verify`: {exc}; move it away, or name another folder", path=str(path)
        ) from exc


def _merge_reports(
    folder: Path, known: Mapping[str, Mapping[str, Any]], variants: Sequence[InstalledVariant], reports: Sequence[VariantReport]
) -> None:
    """Write the reports by cubin digest, beside the ``known`` ones of each arch; entries of cubins that are no longer installed go."""
    archs = {variant.id: str(variant.arch) for variant in variants}
    installed = {variant.record.sha256 for variant in registry().all_variants()}
    for arch, entries in sorted(known.items()):
        kept = {cubin: entry for cubin, entry in entries.items() if cubin in installed}
        fresh = {r.cubin: {k: v for k, v in r.to_json().items() if k != "cubin"} for r in reports if archs[r.variant] == arch}
        content = {"arch": arch, "cubins": {**kept, **fresh}}
        (folder / f"{arch}.json").write_text(json.dumps(content, indent=1, sort_keys=True) + "\n", "utf-8")


def _check_writable(path: Path) -> None:
    """Raises: ArgumentError if there cannot be a file at ``path``. Leaves what it holds."""
    try:
        path.open("a", encoding="utf-8").close()
    except OSError as exc:
        raise ArgumentError(
            f"cannot write the results to {path}: {exc.strerror}; name a file in a folder that exists", path=str(path)
        ) from exc


@click.command("bench")
@patterns_argument
@device_option
@click.option("--peer", type=click.Choice(PEERS), help="Also time this package's version of each operator.")
@click.option("--pdl", is_flag=True, help="Launch the calls as programmatic dependents of each other (`set_pdl`), the peer's too.")
@click.option("--out", type=click.Path(path_type=Path), help="File for the results, one JSON object a line.")
@click.option("--markdown", type=click.Path(path_type=Path), help="File for the results as a Markdown table.")
@json_option
def bench_command(
    patterns: tuple[str, ...], device: int, peer: str | None, pdl: bool, out: Path | None, markdown: Path | None, as_json: bool
) -> None:
    """Time installed kernels on a GPU against a copy of the same size, and against a peer."""
    variants = _on_device(patterns, device)
    for target in filter(None, (out, markdown)):
        _check_writable(target)
    results: list[Measurement] = []

    def show(result: Measurement) -> None:
        results.append(result)
        if as_json:
            emit_json(result.to_json())
        else:
            click.echo(_bench_line(result))

    try:
        bench(variants, device=torch.device("cuda", device), peer=peer, pdl=pdl, on_measurement=show)
    finally:
        if out is not None:
            out.write_text("".join(json.dumps(result.to_json(), sort_keys=True) + "\n" for result in results), "utf-8")
        if markdown is not None:
            markdown.write_text(_table(results), "utf-8")


def _bench_line(result: Measurement) -> str:
    text = (
        f"{result.variant}  {_workload(result)}\n    {result.device_us:8.2f} us  {result.gbytes_per_s:7.0f} GB/s  "
        f"{result.tflops_per_s:6.1f} TFLOP/s  {result.copy_share:5.1%} of copy  host {result.host_us:5.1f} us"
    )
    if result.peer_error:
        text += f"\n    {result.peer} did not run: {result.peer_error}"
    elif result.peer_us is not None:
        text += f"\n    {result.peer}: {result.peer_us:8.2f} us  host {result.peer_host_us:5.1f} us  we are {result.peer_ratio:.2f}x as fast"
    return text


def _workload(result: Measurement) -> str:
    return " ".join(
        f"{name}={value:g}" if isinstance(value, float) else f"{name}={value}" for name, value in result.workload.items()
    )


def _table(results: Sequence[Measurement]) -> str:
    head = "| variant | workload | us | GB/s | TFLOP/s | share of copy | host us | peer us | peer host us | peer / ours |\n"
    lines = [head, "|---|---|---:|---:|---:|---:|---:|---:|---:|---:|\n"]
    for r in results:
        peer = [f"{x:.2f}" if x is not None else "" for x in (r.peer_us, r.peer_host_us, r.peer_ratio)]
        flops = f"{r.tflops_per_s:.1f}" if r.tflops_per_s else ""
        cells = [
            r.variant,
            _workload(r),
            f"{r.device_us:.2f}",
            f"{r.gbytes_per_s:.0f}",
            flops,
            f"{r.copy_share:.1%}",
            f"{r.host_us:.1f}",
            *peer,
        ]
        lines.append("| " + " | ".join(cells) + " |\n")
    return "".join(lines)


def _on_device(patterns: Sequence[str], device: int) -> list[InstalledVariant]:
    """The installed variants that match and run on the device. Raises: DriverNotFoundError, PatternError."""
    if not torch.cuda.is_available():
        raise DriverNotFoundError(
            "this command needs a CUDA device and torch built for CUDA; `tkbuild doctor` says what is missing"
        )
    capability = native().compute_capability(device)
    wanted = patterns or ("*",)
    found = [
        v for v in registry().all_variants() if v.arch.runs_on(capability) and any(api.matches(v, pattern) for pattern in wanted)
    ]
    if not found:
        have = ", ".join(sorted(registry().variants)) or f"none; {install_kernels()}"
        raise PatternError(
            f"{' '.join(wanted)}: nothing installed matches and runs on cuda:{device}; installed: {have}", patterns=wanted
        )
    return found

"""The public functions of ``tkbuild.runtime``."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from tkbuild.arch import TargetArch, split_pattern
from tkbuild.collector import collector_paused
from tkbuild.errors import ArgumentError, NoVariantError, PatternError
from tkbuild.runtime import op
from tkbuild.runtime.launcher import LaunchFunction, native
from tkbuild.runtime.registry import InstalledVariant, installed, registry


@dataclass(frozen=True)
class Coverage:
    """What ``require`` found: the ids of the installed variants that answer each pattern.

    shadowed: for each of their kernels of which another wheel has other code under the same ids, the sentence that says whose runs.
    """

    found: dict[str, tuple[str, ...]]
    shadowed: tuple[str, ...] = ()


def kernels() -> dict[str, tuple[str, ...]]:
    """Return the ids of the installed variants of every kernel, by kernel name.

    Reads manifests only; touches no device. Raises: IntegrityError, PackageError for a damaged or foreign provider.
    """
    return {kernel: tuple(variant.id for variant in variants) for kernel, variants in sorted(registry().variants.items())}


def load(variant_id: str) -> LaunchFunction:
    """Return the launch function of one variant; it takes the arguments of the variant's launch plan in order.

    Raises: NoVariantError for an id that is not installed, IntegrityError for a damaged cubin.
    """
    for variant in registry().all_variants():
        if variant.id == variant_id:
            return op.load(variant)
    raise NoVariantError(f"{variant_id}: not installed; `python -m tkbuild.runtime list` shows what is", variant=variant_id)


def preload(patterns: str | Iterable[str] = "*", device: int | torch.device | None = None) -> tuple[str, ...]:
    """Load the variants that match and run on ``device`` (default: the current one); returns their ids.

    Afterwards their launches load nothing, which CUDA-graph capture needs. Raises: PatternError for a pattern that
    matches nothing installed, NoVariantError if nothing that matches runs on the device, LaunchError, DriverNotFoundError.
    """
    driver = native().driver_version()  # without one this says so, torch only that there is none
    index = torch.device("cuda", device).index if isinstance(device, int) else (device or torch.device("cuda")).index
    index = torch.cuda.current_device() if index is None else index
    capability = native().compute_capability(index)
    matching = match(patterns)
    fitting = [variant for variant in matching if variant.arch.runs_on(capability)]
    if not fitting:
        have = ", ".join(sorted({str(variant.arch) for variant in matching}))
        raise NoVariantError(
            f"nothing that matches {patterns!r} runs on cuda:{index} (compute capability {capability[0]}.{capability[1]}); have {have}",
            patterns=patterns,
            capability=capability,
        )
    with collector_paused():
        for variant in fitting:
            op.check_driver(variant, driver)
            native().preload(op.load(variant), index)
    return tuple(variant.id for variant in fitting)


def require(patterns: str | Iterable[str], arch: str | None = None) -> Coverage:
    """Check that every pattern is answered by an installed variant, of ``arch`` if given: for image builds.

    A pattern is a glob over kernel names and variant ids. Reads files only, and checks the bytes of every cubin that
    matches. Raises: NoVariantError naming each pattern that nothing answers, IntegrityError, ArgumentError for a bad
    arch, no pattern at all or an empty one, PackageError for a kernel that two wheels describe differently.
    """
    wanted = None if arch is None else str(TargetArch.parse(arch))
    found: dict[str, tuple[str, ...]] = {}
    kernels: set[str] = set()
    missing = []
    for pattern in _pattern_list(patterns):
        _check_clashes(pattern)
        matching = [v for v in registry().all_variants() if matches(v, pattern) and wanted in (None, str(v.arch))]
        for variant in matching:
            variant.cubin()
        found[pattern] = tuple(variant.id for variant in matching)
        kernels |= {variant.kernel for variant in matching}
        missing += [] if matching else [pattern]
    if missing:
        archs = sorted({str(variant.arch) for variant in registry().all_variants()})
        have = ", ".join(archs if wanted and wanted not in archs else sorted(registry().variants)) or "none"
        where = f" for {wanted}" if wanted else ""
        raise NoVariantError(
            f"no installed variant{where} answers: {', '.join(missing)}; installed: {have}; install the kernel wheel of your "
            "GPU, or add what is missing to the profile and build again",
            missing=missing,
        )
    return Coverage(found, tuple(text for kernel, text in registry().shadowed.items() if kernel in kernels))


def _check_clashes(pattern: str) -> None:
    """Raises: PackageError for a kernel that ``pattern`` selects and that no wheel provides, since two describe it differently."""
    for root, manifest in registry().providers:
        for record in manifest.variants:
            if record.kernel in registry().clashes and matches(installed(record, root, manifest), pattern):
                op.check_clash(record.kernel)


def _pattern_list(patterns: str | Iterable[str]) -> list[str]:
    found = [patterns] if isinstance(patterns, str) else list(patterns)
    if not found or not all(isinstance(pattern, str) and pattern for pattern in found):
        raise ArgumentError(f"patterns are {found!r}, expected at least one and none empty, such as 'quant.*'", patterns=found)
    return found


def match(patterns: str | Iterable[str]) -> list[InstalledVariant]:
    """Return the installed variants that match. Raises: PatternError for a pattern that matches none, ArgumentError."""
    result: dict[str, InstalledVariant] = {}
    for pattern in _pattern_list(patterns):
        matching = [variant for variant in registry().all_variants() if matches(variant, pattern)]
        if not matching:
            _check_clashes(pattern)
            known = ", ".join(sorted(registry().variants)) or "none"
            raise PatternError(f"{pattern!r} matches no installed variant; installed kernels: {known}", pattern=pattern)
        result |= {variant.id: variant for variant in matching}
    return list(result.values())


def matches(variant: InstalledVariant, pattern: str) -> bool:
    """Whether a pattern such as ``quant.*``, ``*@sm_90a`` or an id selects ``variant``. Raises: PatternError."""
    glob, arch = split_pattern(pattern)
    return arch in (None, variant.arch) and any(fnmatch.fnmatchcase(text, glob) for text in (variant.kernel, variant.id))


def set_num_sms(num_sms: int) -> None:
    """Limit the SMs that persistent kernels launch for, process-wide; 0 lifts the limit.

    More than the device has counts as all of them. Raises: ArgumentError for a negative number.
    """
    if isinstance(num_sms, bool) or not isinstance(num_sms, int) or num_sms < 0:
        raise ArgumentError(f"num_sms is {num_sms!r}, expected a whole number from 0 on, which lifts the limit")
    native().set_num_sms(num_sms)


def get_num_sms(device: int = 0) -> int:
    """Return the SM count that persistent kernels launch for on ``device``; a compiled graph keeps the number it was traced with."""
    return native().num_sms(device)


# What torch.compiler.assume_constant_result does, which would import dynamo here.
get_num_sms._dynamo_marked_constant = True  # type: ignore[attr-defined]


def set_pdl(use_pdl: bool) -> None:
    """Launch kernels as programmatic dependents of their predecessors, where they can be; off by default. Raises: ArgumentError."""
    if use_pdl not in (True, False):
        raise ArgumentError(f"use_pdl is {use_pdl!r}, expected True or False")
    native().set_pdl(bool(use_pdl))


def get_pdl() -> bool:
    """Return whether programmatic dependent launch is on."""
    return native().pdl()

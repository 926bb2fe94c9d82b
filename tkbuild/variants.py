"""Variants: a kernel with every compile-time choice fixed. Expansion, ids that parse back, and selection by pattern."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from tkbuild.arch import TargetArch, split_pattern
from tkbuild.errors import ArgumentError, PatternError, SpecError
from tkbuild.kernelspec import KernelSpec, Profile, Target
from tkbuild.signature import AxisSpec, AxisValue, axis_text


@dataclass(frozen=True, order=True)
class Variant:
    """One kernel, one arch, one value per axis. Variants are equal when their ids are, and sort by kernel, arch, spec order."""

    sort_key: tuple[str, TargetArch, int] = field(repr=False)
    id: str
    spec: KernelSpec = field(repr=False, compare=False)
    arch: TargetArch = field(repr=False, compare=False)
    axes: Mapping[str, AxisValue] = field(repr=False, compare=False)

    @property
    def kernel(self) -> str:
        """The kernel's name."""
        return self.spec.name

    @property
    def target(self) -> Target:
        """What the spec says about this variant's arch."""
        return self.spec.targets[self.arch]


def variant_id(spec: KernelSpec, arch: TargetArch, axes: Mapping[str, AxisValue]) -> str:
    """Return the id: kernel, one token per axis in spec order, arch, joined by '-'."""
    return "-".join([spec.name, *(axis.token(axes[axis.name]) for axis in spec.signature.axes), str(arch)])


def expand(spec: KernelSpec, archs: Iterable[TargetArch] = ()) -> list[Variant]:
    """Return all variants of ``spec`` for those of ``archs`` it has targets for (all of them if none is given)."""
    wanted = set(archs) or set(spec.targets)
    combinations = list(enumerate(spec.combinations()))
    return [_variant(spec, arch, place, axes) for arch in spec.targets if arch in wanted for place, axes in combinations]


def _variant(spec: KernelSpec, arch: TargetArch, place: int, axes: Mapping[str, AxisValue]) -> Variant:
    return Variant((spec.name, arch, place), variant_id(spec, arch, axes), spec, arch, axes)


def parse_id(text: str, specs: Mapping[str, KernelSpec]) -> Variant:
    """Return the variant that ``text`` is the id of.

    Raises: PatternError for an unknown kernel, arch or axis value, or a combination that the constraints exclude.
    """
    kernel, *tokens = text.split("-")
    spec = specs.get(kernel)
    if spec is None:
        raise PatternError(f"{text}: unknown kernel {kernel!r}{_nearest(kernel, specs)}", pattern=text)
    axes = _axes_of(text, spec, tokens[:-1])
    arch = _arch_of(text, spec, tokens[-1:])
    for place, admitted in enumerate(spec.combinations()):
        if admitted == axes:
            return _variant(spec, arch, place, axes)
    broken = next(c for c in spec.constraints if not c.require.evaluate(axes))
    raise PatternError(f"{text}: not built, since {broken.because} ({broken.require})", pattern=text)


def _axes_of(text: str, spec: KernelSpec, tokens: Sequence[str]) -> dict[str, AxisValue]:
    axes = spec.signature.axes
    if len(tokens) != len(axes):
        shape = "-".join([spec.name, *(f"<{axis.name}>" for axis in axes), "<arch>"])
        raise PatternError(f"{text}: expected {shape}; `tkbuild list {spec.name}` shows all", pattern=text)
    return {axis.name: _axis_value(text, axis, token) for axis, token in zip(axes, tokens, strict=True)}


def _axis_value(text: str, axis: AxisSpec, token: str) -> AxisValue:
    by_token = {axis.token(value): value for value in axis.values}
    if token not in by_token:
        known = ", ".join(by_token)
        raise PatternError(f"{text}: {axis.name} {token!r} is not built{_nearest(token, by_token)}; built: {known}", pattern=text)
    return by_token[token]


def _arch_of(text: str, spec: KernelSpec, tokens: Sequence[str]) -> TargetArch:
    try:
        arch = TargetArch.parse(tokens[0] if tokens else "")
    except ArgumentError as exc:
        raise PatternError(f"{text}: {exc.message}", pattern=text) from exc
    if arch not in spec.targets:
        known = ", ".join(map(str, spec.targets))
        raise PatternError(f"{text}: {spec.path} has no target {arch}; it has {known}", pattern=text)
    return arch


def select(
    specs: Mapping[str, KernelSpec],
    patterns: Sequence[str] = (),
    archs: Iterable[TargetArch] = (),
    profile: Profile | None = None,
) -> list[Variant]:
    """Return the variants that ``patterns`` name, for ``archs``, as far as ``profile`` admits them; each once, in order.

    A pattern is a shell glob over kernel names and variant ids, ``GLOB@ARCH`` restricts its arch, no pattern means all.
    Without archs every target of each spec counts. An exact variant id is admitted by any profile.

    Raises: PatternError for a pattern that selects nothing, with the nearest names; SpecError for a profile that does not
    fit the specs.
    """
    archs = tuple(archs)
    everything = [variant for name in sorted(specs) for variant in expand(specs[name])]
    admitted = _admitted(everything, specs, profile) if profile else everything
    chosen: set[Variant] = set()
    for pattern in patterns or ("*",):
        found = _matching(pattern, _of_archs(admitted, archs), _of_archs(everything, archs))
        if not found:
            raise PatternError(_nothing(pattern, everything, _of_archs(everything, archs), archs), pattern=pattern)
        chosen |= found
    return sorted(chosen)


def _of_archs(variants: list[Variant], archs: Sequence[TargetArch]) -> list[Variant]:
    return [variant for variant in variants if variant.arch in archs] if archs else variants


def _matching(pattern: str, admitted: list[Variant], wanted: list[Variant]) -> set[Variant]:
    return {variant for variant in wanted if variant.id == pattern} or _filter(pattern, admitted)


def _filter(pattern: str, variants: list[Variant]) -> set[Variant]:
    glob, wanted = split_pattern(pattern)
    return {v for v in variants if wanted in (None, v.arch) and _matches(glob, v)}


def _matches(glob: str, variant: Variant) -> bool:
    return fnmatchcase(variant.kernel, glob) or fnmatchcase(variant.id, glob)


def _nothing(pattern: str, everything: list[Variant], wanted: list[Variant], asked: Iterable[TargetArch] = ()) -> str:
    if _filter(pattern, wanted):
        return f"{pattern!r} selects only variants that the profile leaves out; name another profile, or a whole id"
    glob, arch = split_pattern(pattern)
    if any(_matches(glob, variant) for variant in everything):
        have = ", ".join(map(str, sorted({v.arch for v in everything if _matches(glob, v)})))
        lacking = " and ".join(filter(None, [str(arch or ""), " or ".join(map(str, asked))]))
        return f"{pattern!r} selects nothing: {glob!r} has `targets` for {have}, none is for {lacking}; add it to the spec"
    if any(_matches(f"{glob}.*", variant) for variant in everything):
        return f"{pattern!r} selects nothing; did you mean {glob}.*?"
    return f"{pattern!r} selects nothing{_nearest(glob, _names(everything))}"


def _names(everything: list[Variant]) -> list[str]:
    return [*dict.fromkeys(variant.kernel for variant in everything), *(variant.id for variant in everything)]


def _nearest(text: str, known: Iterable[str]) -> str:
    found = difflib.get_close_matches(text, [*known][:2000], n=3, cutoff=0.5)
    return f"; did you mean {' or '.join(found)}?" if found else ""


# ---- profiles


def _admitted(everything: list[Variant], specs: Mapping[str, KernelSpec], profile: Profile) -> list[Variant]:
    _check_profile(everything, specs, profile)
    by_name = {variant for pattern in profile.kernels for variant in _filter(pattern, everything)}
    admitted = [variant for variant in everything if variant in by_name and _axes_admitted(variant, profile)]
    emptied = sorted({variant.kernel for variant in by_name} - {variant.kernel for variant in admitted})
    if emptied:
        problems = tuple(f"{profile.path}: axes.{kernel}: no variant has all of these values" for kernel in emptied)
        raise SpecError("\n".join(problems), problems=problems)
    return admitted


def _axes_admitted(variant: Variant, profile: Profile) -> bool:
    return all(variant.axes[axis] in values for axis, values in profile.axes.get(variant.kernel, {}).items())


def _check_profile(everything: list[Variant], specs: Mapping[str, KernelSpec], profile: Profile) -> None:
    problems = [problem for kernel in profile.axes for problem in _axes_problems(kernel, specs, profile)]
    problems += [f"kernels: {_nothing(p, everything, everything)}" for p in profile.kernels if not _filter(p, everything)]
    if problems:
        raise SpecError("\n".join(f"{profile.path}: {problem}" for problem in problems), problems=tuple(problems))


def _axes_problems(kernel: str, specs: Mapping[str, KernelSpec], profile: Profile) -> list[str]:
    if kernel not in specs:
        return [f"axes.{kernel}: unknown kernel{_nearest(kernel, specs)}"]
    by_name = {axis.name: axis for axis in specs[kernel].signature.axes}
    problems = []
    for name, values in profile.axes[kernel].items():
        if name not in by_name:
            problems.append(f"axes.{kernel}.{name}: no such axis{_nearest(name, by_name)}; it has {', '.join(by_name) or 'none'}")
            continue
        built = by_name[name].values
        problems += [f"axes.{kernel}.{name}: {v!r} is no value; values: {_texts(built)}" for v in values if not _has(built, v)]
    return problems


def _has(values: Sequence[AxisValue], wanted: object) -> bool:
    return any(value == wanted and type(value) is type(wanted) for value in values)


def _texts(values: Iterable[AxisValue]) -> str:
    return ", ".join(map(axis_text, values))

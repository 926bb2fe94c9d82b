"""Choose the variant for a call: a pure function of what is built and what the call asks for.

Every candidate is accepted or rejected with a reason; an error prints that list and what to add to the spec or profile.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from tkbuild.arch import SUPPORTED, Capability, TargetArch, archs_for, best_first
from tkbuild.dtypes import DTYPES
from tkbuild.errors import NoVariantError, pip_install
from tkbuild.runtime.registry import InstalledVariant
from tkbuild.signature import AxisSpec, AxisValue, KernelSignature

_TRACE_LIMIT = 24


@dataclass(frozen=True)
class Request:
    """What a call asks for.

    axes: values of the axes that the call names or its tensors' dtypes decide.  chosen: for each axis with a
    ``choose`` rule the value of its ``of``.  device: for messages, such as ``cuda:0``.
    """

    axes: Mapping[str, AxisValue | str]
    chosen: Mapping[str, int]
    capability: Capability
    device: str


@dataclass(frozen=True)
class Verdict:
    """One candidate: accepted when ``reason`` is empty."""

    variant: InstalledVariant
    reason: str


@dataclass(frozen=True)
class Selection:
    """The outcome for every candidate; ``variant`` is the accepted one or None."""

    variant: InstalledVariant | None
    trace: tuple[Verdict, ...]


def select(signature: KernelSignature, candidates: Sequence[InstalledVariant], request: Request) -> Selection:
    """Return the variant of ``candidates`` for ``request``, with the verdict on each.

    Archs are compared exactly: an exact target is preferred to a family target, and no major number stands for another.
    """
    rejected: dict[str, str] = {}
    fitting = list(candidates)
    for judge in (*_fixed_judges(signature, request), *(_choose_judge(axis, request) for axis in signature.axes if axis.choose)):
        reasons = judge(fitting)
        rejected.update({variant.id: reason for variant, reason in zip(fitting, reasons, strict=True) if reason})
        fitting = [variant for variant, reason in zip(fitting, reasons, strict=True) if not reason]
    fitting = _best_arch(fitting, request, rejected)
    trace = tuple(Verdict(variant, rejected.get(variant.id, "")) for variant in candidates)
    return Selection(fitting[0] if fitting else None, trace)


def select_or_raise(signature: KernelSignature, candidates: Sequence[InstalledVariant], request: Request) -> InstalledVariant:
    """Return the selected variant. Raises: NoVariantError with the verdict on every candidate and the next step."""
    selection = select(signature, candidates, request)
    if selection.variant is None:
        raise NoVariantError(
            _explain(signature, selection, request),
            kernel=signature.kernel,
            axes={**request.axes, **request.chosen},
            capability=request.capability,
            available=[variant.id for variant in candidates],
        )
    return selection.variant


_Judge = Callable[[Sequence[InstalledVariant]], "list[str]"]


def _fixed_judges(signature: KernelSignature, request: Request) -> list[_Judge]:
    judges: list[_Judge] = [lambda variants: [_arch_reason(variant.arch, request) for variant in variants]]
    for axis in signature.call_axes:
        judges.append(lambda variants, axis=axis: [_axis_reason(signature, axis, variant, request) for variant in variants])  # type: ignore[misc]
    return judges


def _arch_reason(arch: TargetArch, request: Request) -> str:
    if arch.runs_on(request.capability):
        return ""
    return f"built for {arch}, {request.device} has compute capability {_dotted(request.capability)}"


def _axis_reason(signature: KernelSignature, axis: AxisSpec, variant: InstalledVariant, request: Request) -> str:
    wanted, built = request.axes[axis.name], variant.axes[axis.name]
    if wanted == built:
        return ""
    position = signature.inferred_axes.get(axis.name)
    if position is None:
        return f"{axis.name} is {wanted}, built for {built}"
    arg = signature.args[position]
    return f"{arg.name} is {wanted if axis.type == 'dtype' else arg.dtype.resolve(request.axes)}, built for {arg.dtype.resolve(variant.axes)}"


def _choose_judge(axis: AxisSpec, request: Request) -> _Judge:
    def judge(variants: Sequence[InstalledVariant]) -> list[str]:
        assert axis.choose is not None
        wanted = request.chosen[axis.name]
        values = tuple(sorted({int(variant.axes[axis.name]) for variant in variants}))
        picked = axis.choose.pick(values, wanted)
        rule = axis.choose.rule.replace("_", " ")
        reasons = []
        for variant in variants:
            built = variant.axes[axis.name]
            if built == picked:
                reasons.append("")
            elif picked is None:
                reasons.append(f"{axis.name} is {built}, it must be {rule} {axis.choose.of} = {wanted}")
            else:
                reasons.append(f"{axis.name} is {built}, {picked} fits {axis.choose.of} = {wanted} better")
        return reasons

    return judge


def _best_arch(fitting: list[InstalledVariant], request: Request, rejected: dict[str, str]) -> list[InstalledVariant]:
    order = best_first((variant.arch for variant in fitting), request.capability)
    best = [variant for variant in fitting if variant.arch == order[0]][:1] if order else []
    for variant in fitting:
        if variant not in best:
            rejected[variant.id] = f"{best[0].id} is preferred on compute capability {_dotted(request.capability)}"
    return best


def _explain(signature: KernelSignature, selection: Selection, request: Request) -> str:
    lines = [
        f"no variant of '{signature.kernel}' fits this call on {request.device} (compute capability {_dotted(request.capability)})"
    ]
    ids = [verdict.variant.id for verdict in selection.trace[:_TRACE_LIMIT]]
    width = max(map(len, ids), default=0)
    lines += [f"  {verdict.variant.id:<{width}}  rejected: {verdict.reason}" for verdict in selection.trace[:_TRACE_LIMIT]]
    if len(selection.trace) > _TRACE_LIMIT:
        lines.append(f"  ... and {len(selection.trace) - _TRACE_LIMIT} more")
    lines.append(_next_step(signature, selection, request))
    return "\n".join(lines)


def _next_step(signature: KernelSignature, selection: Selection, request: Request) -> str:
    family, name = signature.kernel.split(".", 1)
    if not any(verdict.variant.arch.runs_on(request.capability) for verdict in selection.trace):
        have = ", ".join(sorted({str(verdict.variant.arch) for verdict in selection.trace})) or "nothing"
        return f"have {have}; {install_for(request.capability)}"
    missing = [
        f"{axis.name}: {_spelled(axis, value)}"
        for axis, value in ((axis, request.axes.get(axis.name, request.chosen.get(axis.name))) for axis in signature.axes)
        if value is not None and all(verdict.variant.axes[axis.name] != value for verdict in selection.trace)
    ]
    what = "; ".join(missing) or "this combination of axis values"
    return f"add {what} to the axes of kernel_specs/{family}/{name}.yaml (or to the profile's `axes`) and build again"


def install_for(capability: Capability) -> str:
    """Return what to do where no installed variant runs on a device of ``capability``."""
    archs = [arch for arch in archs_for(capability) if arch in SUPPORTED]
    if not archs:
        known = ", ".join(map(str, SUPPORTED))
        return f"tkbuild does not support GPUs of compute capability {_dotted(capability)}; it compiles for {known}"
    return (
        f"need {' or '.join(map(str, archs))}: {pip_install(f'tkbuild-kernels-{archs[0].wheel_suffix}')}; "
        f"`tkbuild package --arch {archs[0]}` writes that wheel, of the kernels whose specs have `targets` for it"
    )


def _spelled(axis: AxisSpec, value: AxisValue | str) -> str:
    return DTYPES[str(value)].name if axis.type == "dtype" and str(value) in DTYPES else str(value)


def _dotted(capability: Capability) -> str:
    return f"{capability[0]}.{capability[1]}"

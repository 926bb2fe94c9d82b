"""Run installed variants on a GPU against their references, on fresh random data.

Outputs are poisoned first, and the storage around and between their rows must come back untouched. The GPU side needs
torch, apache-tvm-ffi and the wheels only.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from tkbuild.cases import Call, GuardedTensor, complete_values, make_call, reference_function
from tkbuild.checks import Case, CaseValue, KernelChecks, Tolerance
from tkbuild.errors import ArgumentError, IntegrityError, VerifyError
from tkbuild.manifest import VERIFIED
from tkbuild.runtime.launcher import native
from tkbuild.runtime.op import load
from tkbuild.runtime.registry import InstalledVariant, read_checks_file, registry, reinstall

_LISTED_MISMATCHES = 3
#: Comparisons in float64 work on this many elements at a time.
_CHUNK_ELEMS = 2**26


@dataclass(frozen=True)
class CaseFailure:
    """One call whose result was wrong: its values and what differed."""

    values: Mapping[str, CaseValue]
    text: str


@dataclass(frozen=True)
class VariantReport:
    """What verifying one variant showed. ``cubin`` is the sha256 of the code that ran."""

    variant: str
    cubin: str
    device: str
    driver: str
    seed: int
    cases: int
    largest_elems: int
    failures: tuple[CaseFailure, ...] = field(default=())

    @property
    def is_verified(self) -> bool:
        """Whether it ran, and nothing differed."""
        return self.cases > 0 and not self.failures

    def to_json(self) -> dict[str, Any]:
        state = VERIFIED if self.is_verified else "failed"
        return {**asdict(self), "state": state, "failures": [{"values": dict(f.values), "text": f.text} for f in self.failures]}


def read_checks() -> dict[str, KernelChecks]:
    """Return the checks of every installed kernel. Raises: IntegrityError for a damaged or missing file."""
    found: dict[str, KernelChecks] = {}
    for root, manifest in registry().providers:
        for kernel, value in read_checks_file(root, manifest)["kernels"].items():
            try:
                found.setdefault(kernel, KernelChecks.from_json(value))
            except IntegrityError as exc:
                raise IntegrityError(f"{root}: {kernel}: {exc.message}; {reinstall(manifest.name)}", kernel=kernel) from exc
    return found


def verify(
    variants: Sequence[InstalledVariant],
    *,
    device: torch.device,
    large: bool = False,
    seed: int | None = None,
    on_report: Callable[[VariantReport], None] = lambda report: None,
) -> list[VariantReport]:
    """Verify ``variants`` on ``device`` and return a report each.

    large: also the cases that need tens of gigabytes.  seed: drawn freshly if not given; it is in the report.
    A wrong result is a failure in the report; a variant without cases, or without reference, has none, and is not verified.
    """
    seed = secrets.randbits(31) if seed is None else seed
    checks = read_checks()
    reports = []
    for variant in variants:
        report = _verify_variant(variant, checks[variant.kernel], device, large, seed)
        on_report(report)
        reports.append(report)
    return reports


def _verify_variant(variant: InstalledVariant, checks: KernelChecks, device: torch.device, large: bool, seed: int) -> VariantReport:
    generator = torch.Generator(device).manual_seed(seed)
    failures: list[CaseFailure] = []
    count = largest = 0
    if (wanted := checks.verify) and (reference := checks.reference):
        for case, values in applicable_calls(variant, wanted.cases, large):
            call = make_call(registry().signatures[variant.kernel], values, {**wanted.inputs, **(case.inputs or {})}, generator)
            largest = max([largest, *(view.numel() for view in call.views if view is not None)])
            text = _run(variant, call, reference, wanted.tolerance)
            given = {name: value for name, value in values.items() if name not in variant.axes}
            failures += [CaseFailure(given, text)] if text else []
            count += 1
            del call
    return VariantReport(
        variant=variant.id,
        cubin=variant.record.sha256,
        device=torch.cuda.get_device_name(device),
        driver=".".join(map(str, native().driver_version())),
        seed=seed,
        cases=count,
        largest_elems=largest,
        failures=tuple(failures),
    )


def applicable_calls(variant: InstalledVariant, cases: Sequence[Case], large: bool) -> Iterator[tuple[Case, dict[str, CaseValue]]]:
    """Yield the cases' calls that select this variant, with every value filled in."""
    signature = registry().signatures[variant.kernel]
    siblings = [other for other in registry().variants[variant.kernel] if other.arch == variant.arch]
    for case in cases:
        if case.large and not large:
            continue
        for given in case.calls(variant.axes):
            values = complete_values(signature, given, variant.axes)
            if all(
                axis.choose.pick(tuple(sorted({int(other.axes[axis.name]) for other in siblings})), axis.choose.of.evaluate(values))
                == variant.axes[axis.name]
                for axis in signature.axes
                if axis.choose
            ):
                yield case, values


def _run(variant: InstalledVariant, call: Call, reference: str, tolerance: Mapping[str, Tolerance]) -> str:
    """Launch, compare; returns what was wrong, or nothing."""
    before = [None if view is None else view.clone() for view in call.input_views]
    try:
        load(variant)(*call.views, *call.scalars, *call.option_values)
    except ArgumentError as exc:
        return f"the launcher refused the case: {exc}"
    torch.cuda.synchronize()
    expected = reference_function(reference)(*before, **call.keywords())
    expected = expected if isinstance(expected, tuple) else (expected,)
    args = call.signature.args
    problems = [
        f"{arg.name} was changed, it is an input"
        for arg, view, old in zip(args, call.input_views, before, strict=False)
        if arg.role == "in" and view is not None and old is not None and not _same_bytes(view, old)
    ]
    results = [(arg.name, t) for arg, t in zip(args, call.tensors, strict=True) if t is not None and arg.role in ("out", "inout")]
    if len(results) != len(expected):
        raise VerifyError(f"{reference} returned {len(expected)} tensors, expected {len(results)}", reference=reference)
    for (name, tensor), wanted in zip(results, expected, strict=True):
        problems += _compare(name, tensor, wanted, tolerance.get(name, Tolerance()))
    for arg, guarded in zip(args, call.tensors, strict=True):
        if guarded is not None and (stray := guarded.stray_writes()):
            problems.append(f"{arg.name}: {stray} bytes outside the tensor were written")
    return "; ".join(problems)


def _compare(name: str, tensor: GuardedTensor, wanted: torch.Tensor, tolerance: Tolerance) -> list[str]:
    got = tensor.view
    if got.shape != wanted.shape or got.dtype != wanted.dtype:
        return [f"{name}: the reference has {tuple(wanted.shape)} {wanted.dtype}, the kernel {tuple(got.shape)} {got.dtype}"]
    problems = []
    wrong = _wrong(got, wanted, tolerance)
    if count := int(wrong.sum()):
        places = [tuple(place) for place in wrong.nonzero()[:_LISTED_MISMATCHES].tolist()]
        shown = ", ".join(f"{place}: {got[place].item()!r} for {wanted[place].item()!r}" for place in places)
        problems.append(f"{name}: {count} of {got.numel()} elements differ from the reference, at {shown}")
    return problems


def _wrong(got: torch.Tensor, wanted: torch.Tensor, tolerance: Tolerance) -> torch.Tensor:
    if tolerance.exact:
        return _as_integers(got) != _as_integers(wanted)
    wrong = torch.empty(got.shape, dtype=torch.bool, device=got.device)
    step = max(1, _CHUNK_ELEMS * got.shape[0] // max(1, got.numel())) if got.dim() else 1
    for a, b, out in zip(got.split(step), wanted.split(step), wrong.split(step), strict=True):
        out.copy_(_far(a.double(), b.double(), tolerance))
    return wrong


def _far(a: torch.Tensor, b: torch.Tensor, tolerance: Tolerance) -> torch.Tensor:
    close = (a - b).abs() <= tolerance.atol + tolerance.rtol * b.abs()
    return ~(close | (a == b) | (a.isnan() & b.isnan()))


_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _as_integers(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(_INTEGERS[x.element_size()])


def _same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(_as_integers(a), _as_integers(b))

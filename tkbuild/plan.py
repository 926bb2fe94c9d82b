"""What a build has to do, as data: steps with keys made of everything that can change their results. Compiles nothing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from tkbuild.arch import TargetArch, target_profile
from tkbuild.digest import bytes_digest, key_digest
from tkbuild.errors import ArgumentError
from tkbuild.facts import BuildFacts
from tkbuild.flags import compile_flags
from tkbuild.render import Renderer
from tkbuild.signature import AxisValue, KernelSignature
from tkbuild.variants import Variant

#: The meaning of the fields of each key. Raise one when a field is added or means something else, or when tkbuild
#: itself makes something else of the same fields.
LOWER_KEY_SCHEMA = 1
COMPILE_KEY_SCHEMA = 1


@dataclass(frozen=True)
class BuildRequest:
    """One variant to build. source: its rendered template.  sources: further files it may import, by name.

    allow: most bytes a kernel may use, by name of the resource.  programmatic: the spec's launch mode.
    """

    variant: str
    arch: TargetArch
    signature: KernelSignature
    axes: Mapping[str, AxisValue]
    source: str
    sources: Mapping[str, bytes]
    pass_configs: Mapping[str, Any]
    extra_flags: tuple[str, ...]
    allow: Mapping[str, int]
    programmatic: str = "off"

    @property
    def flags(self) -> tuple[str, ...]:
        """The compiler's flags for this variant. Raises: ArgumentError for flags that are refused."""
        return compile_flags(self.pass_configs, self.extra_flags)


def make_requests(variants: Iterable[Variant], renderer: Renderer | None = None) -> list[BuildRequest]:
    """Render ``variants`` and return a request for each. Raises: RenderError."""
    renderer = renderer or Renderer()
    return [_request(variant, renderer) for variant in variants]


def _request(variant: Variant, renderer: Renderer) -> BuildRequest:
    rendered, spec = renderer.render(variant), variant.spec
    return BuildRequest(
        variant=variant.id,
        arch=variant.arch,
        signature=spec.signature,
        axes=variant.axes,
        source=rendered.text,
        sources={file.name: file.content for file in rendered.sources},
        pass_configs=spec.pass_configs,
        extra_flags=spec.compile_flags,
        allow=asdict(spec.allow),
        programmatic=spec.programmatic,
    )


@dataclass(frozen=True)
class LowerStep:
    """Lower one source for one arch; serves every request whose key is the same."""

    key: str
    fields: Mapping[str, Any]
    requests: tuple[BuildRequest, ...]

    @property
    def variants(self) -> tuple[str, ...]:
        """Ids of the variants this step serves."""
        return tuple(request.variant for request in self.requests)


@dataclass(frozen=True)
class CompileStep:
    """Compile one CUDA source; its key is known once the source is."""

    key: str
    fields: Mapping[str, Any]
    cuda_source: str
    arch: TargetArch
    flags: tuple[str, ...]


@dataclass(frozen=True)
class BuildPlan:
    """The steps of a build, in the order in which they are best run: what shares headers lies together."""

    steps: tuple[LowerStep, ...]
    facts: BuildFacts

    @property
    def variants(self) -> tuple[str, ...]:
        """Ids of all variants."""
        return tuple(variant for step in self.steps for variant in step.variants)


def make_plan(requests: Iterable[BuildRequest], facts: BuildFacts) -> BuildPlan:
    """Return the plan for ``requests``; equal sources with equal options become one step.

    Raises: ArgumentError for compile flags that no key can cover.
    """
    grouped: dict[str, tuple[dict[str, Any], list[BuildRequest]]] = {}
    for request in sorted(requests, key=lambda one: (one.arch, one.variant)):
        request.flags  # noqa: B018 - refuses flags before anything is built
        fields = lower_fields(request, facts)
        grouped.setdefault(key_digest(LOWER_KEY_SCHEMA, fields), (fields, []))[1].append(request)
    return BuildPlan(tuple(LowerStep(key, fields, tuple(members)) for key, (fields, members) in grouped.items()), facts)


def lower_fields(request: BuildRequest, facts: BuildFacts) -> dict[str, Any]:
    """Return everything that can change the CUDA source or the launch facts of a request."""
    return {
        "step": "lower",
        "source": bytes_digest(request.source.encode()),
        "sources": {name: bytes_digest(content) for name, content in request.sources.items()},
        "pass configs": dict(request.pass_configs),
        "arch": str(request.arch),
        "target profile": asdict(target_profile(request.arch)),
        **facts.lowering,
    }


def compile_step(cuda_source: str, request: BuildRequest, facts: BuildFacts) -> CompileStep:
    """Return the step that compiles what a request was lowered to."""
    fields = {
        "step": "compile",
        "cuda source": bytes_digest(cuda_source.encode()),
        "flags": list(request.flags),
        "arch": str(request.arch),
        **facts.compiling,
    }
    return CompileStep(key_digest(COMPILE_KEY_SCHEMA, fields), fields, cuda_source, request.arch, request.flags)


def shard(plan: BuildPlan, index: int, count: int) -> BuildPlan:
    """Return part ``index`` (from 1) of ``count`` of a plan's steps; the parts are disjoint and together the whole.

    A step's part depends on its own key alone. Raises: ArgumentError unless 1 <= index <= count.
    """
    if not 1 <= index <= count:
        raise ArgumentError(f"--shard {index}/{count}: expected I/N with 1 <= I <= N", index=index, count=count)
    return BuildPlan(tuple(step for step in plan.steps if int(step.key[:16], 16) % count == index - 1), plan.facts)


@dataclass(frozen=True)
class FieldChange:
    """A key field that differs from the stored build's; None stands for a field that one side does not have."""

    field: str
    stored: Any
    now: Any


def changed_fields(stored: Mapping[str, Any], now: Mapping[str, Any]) -> list[FieldChange]:
    """Return the fields that differ, by name; mappings are compared entry by entry."""
    before, after = _flat(stored), _flat(now)
    names: Sequence[str] = sorted({*before, *after})
    return [FieldChange(name, before.get(name), after.get(name)) for name in names if before.get(name) != after.get(name)]


def _flat(fields: Mapping[str, Any]) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in fields.items():
        if isinstance(value, Mapping):
            flat |= {f"{name}.{inner}": item for inner, item in value.items()}
        else:
            flat[name] = value
    return flat

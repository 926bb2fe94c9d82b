"""What the store has of a plan: built variants, the keys they need, and why one is not there. Builds nothing."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from tkbuild.digest import bytes_digest
from tkbuild.errors import TkbuildError
from tkbuild.facts import BuildFacts
from tkbuild.launchplan import make_launch_plan
from tkbuild.plan import BuildPlan, BuildRequest, CompileStep, FieldChange, LowerStep, changed_fields, compile_step
from tkbuild.store import Artifact, Store

Json = Any


@dataclass(frozen=True)
class BuiltVariant:
    """A variant that is in the store, under its two keys. plan: its launch plan.  resources: by kernel function."""

    request: BuildRequest
    plan: Mapping[str, Json]
    cubin: bytes = field(repr=False)
    cubin_sha256: str
    resources: Mapping[str, Mapping[str, int]]
    lower_key: str
    compile_key: str

    @property
    def variant(self) -> str:
        """The variant's id."""
        return self.request.variant


def load_built(
    plan: BuildPlan, store: Store, on_misfit: Callable[[str, TkbuildError], None] | None = None
) -> dict[str, BuiltVariant]:
    """Return by id those variants of ``plan`` that are in the store, verified; builds nothing.

    A stored kernel that does not fit its spec any more is left out. on_misfit: told its variant and the reason; without
    it, the store's ``warn`` is told.
    """
    tell = on_misfit or (lambda variant, exc: store.warn(f"{variant} is stored but does not fit its spec: {exc}"))
    found = {}
    for step in plan.steps:
        for request in step.requests:
            for stored in stored_results(replace(step, requests=(request,)), plan.facts, store) or ():
                try:
                    found[request.variant] = built_variant(*stored)
                except TkbuildError as exc:
                    tell(request.variant, exc)
    return found


def needed_keys(plan: BuildPlan, store: Store) -> set[str]:
    """Return the keys of all entries that ``plan`` makes use of, stored or not; those of cubins as far as they are known.

    A cubin's key is known once its kernel is lowered. Raises: StoreError.
    """
    keys = {step.key for step in plan.steps}
    for step in plan.steps:
        lowered = store.get("lowered", step.key)
        if lowered is not None:
            keys |= {compile_step_of(lowered, request, plan.facts).key for request in step.requests}
    return keys


def stored_results(step: LowerStep, facts: BuildFacts, store: Store) -> list[tuple[BuildRequest, Artifact, Artifact]] | None:
    """Return each request of a step with its lowered kernel and cubin, or None if the store lacks any of them."""
    lowered = store.get("lowered", step.key)
    if lowered is None:
        return None
    cubins: dict[str, Artifact] = {}
    found = []
    for request in step.requests:
        key = compile_step_of(lowered, request, facts).key
        cubin = cubins.get(key) or store.get("cubins", key)
        if cubin is None:
            return None
        cubins[key] = cubin
        found.append((request, lowered, cubin))
    return found


def compile_step_of(lowered: Artifact, request: BuildRequest, facts: BuildFacts) -> CompileStep:
    """Return the step that compiles a lowered kernel for ``request``."""
    return compile_step(lowered.files["kernel.cu"].decode(), request, facts)


def built_variant(request: BuildRequest, lowered: Artifact, cubin: Artifact) -> BuiltVariant:
    """Return the variant that artifacts make up. Raises: TkbuildError if they do not fit its spec."""
    content = cubin.files["kernel.cubin"]
    plan = launch_plan(request, lowered)
    return BuiltVariant(request, plan, content, bytes_digest(content), cubin.facts["resources"], lowered.key, cubin.key)


def launch_plan(request: BuildRequest, lowered: Artifact) -> dict[str, Json]:
    """Return the launch plan of ``request``. Raises: TkbuildError if the lowered kernel does not fit its spec."""
    return make_launch_plan(
        request.signature,
        variant=request.variant,
        arch=str(request.arch),
        axes=request.axes,
        launch_facts=json.loads(lowered.files["plan.json"]),
        programmatic=request.programmatic,
    )


@dataclass(frozen=True)
class Explanation:
    """Why a variant is or is not stored. lower, compile: the fields of its keys now; compile is empty before it was lowered.

    changed: what differs from the newest stored build of this variant, if the current one is not stored.
    """

    variant: str
    lower_key: str
    lower: Mapping[str, Json]
    is_lowered: bool
    compile_key: str
    compile: Mapping[str, Json]
    is_compiled: bool
    changed: tuple[FieldChange, ...]

    def to_json(self) -> dict[str, Json]:
        """Return the explanation as a JSON object."""
        return asdict(self)

    def text(self) -> str:
        """Return the explanation for a reader."""
        lines = [self.variant]
        for title, key, fields, is_stored in (
            ("lowered", self.lower_key, self.lower, self.is_lowered),
            ("compiled", self.compile_key, self.compile, self.is_compiled),
        ):
            if key:
                lines += [f"{title}: {'stored' if is_stored else 'not stored'}, key {key}"]
                lines += [f"  {name}: {json.dumps(value, sort_keys=True)}" for name, value in fields.items()]
        if self.changed:
            lines += ["changed since the newest stored build:"]
            lines += [f"  {one.field}: {json.dumps(one.stored)} -> {json.dumps(one.now)}" for one in self.changed]
        elif not self.is_compiled:
            lines += ["no earlier build of this variant is stored" if not self.is_lowered else "not compiled yet"]
        return "\n".join(lines)


def explain(plan: BuildPlan, store: Store) -> Explanation:
    """Return the key fields of the one variant in ``plan``, and what changed since its newest stored build; builds nothing."""
    (step,) = plan.steps
    (request,) = step.requests
    lowered = store.get("lowered", step.key)
    if lowered is None:
        changed = _changes(store, "lowered", request.variant, step.fields)
        return Explanation(request.variant, step.key, step.fields, False, "", {}, False, changed)
    compiling = compile_step_of(lowered, request, plan.facts)
    is_compiled = store.get("cubins", compiling.key) is not None
    changed = () if is_compiled else _changes(store, "cubins", request.variant, compiling.fields)
    return Explanation(request.variant, step.key, step.fields, True, compiling.key, compiling.fields, is_compiled, changed)


def _changes(store: Store, kind: str, variant: str, now: Mapping[str, Json]) -> tuple[FieldChange, ...]:
    for entry in sorted(store.entries(kind), key=lambda one: one.stored_at, reverse=True):
        artifact = store.get(kind, entry.key)
        if artifact is not None and variant in artifact.facts["variants"]:
            return tuple(changed_fields(artifact.fields, now))
    return ()

"""What the store has of a plan: explaining, loading, and which keys are needed."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from fake_build import FACTS, SIGNATURE, Builder, request, use_fake_worker

from tkbuild.errors import TkbuildError
from tkbuild.expr import Expr
from tkbuild.facts import BuildFacts
from tkbuild.plan import BuildRequest, make_plan
from tkbuild.signature import ArgSpec, DtypeRule
from tkbuild.stored import Explanation, explain, load_built, needed_keys


@pytest.fixture
def builder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Builder:
    use_fake_worker(monkeypatch)
    return Builder(tmp_path)


def test_explain_tells_what_changed(builder: Builder) -> None:
    def explanation(one: BuildRequest, facts: BuildFacts = FACTS) -> Explanation:
        return explain(make_plan([one], facts), builder.store)

    first = explanation(request("a"))
    assert (first.is_lowered, first.is_compiled, first.changed) == (False, False, ())
    builder(request("a"), request("b"))
    assert explanation(request("a")).is_compiled
    changed = explanation(request("a", pass_configs={"tl.x": 1}))
    assert [(one.field, one.stored, one.now) for one in changed.changed] == [("pass configs.tl.x", None, 1)]
    newer = explanation(request("a"), replace(FACTS, compiling={"cuda": "newer"}))
    assert (newer.is_lowered, newer.is_compiled) == (True, False)
    assert [(one.field, one.stored, one.now) for one in newer.changed] == [("cuda", "fake", "newer")]
    assert newer.text().splitlines()[-2:] == ["changed since the newest stored build:", '  cuda: "fake" -> "newer"']
    json.dumps(newer.to_json())


def test_stored_variants_are_loaded_without_building(builder: Builder) -> None:
    a, twin, b = request("a", "same\n"), request("twin", "same\n", extra_flags=("-DX",)), request("b")
    built = {one.variant: one for one in builder(a, b).built}
    assert load_built(make_plan([a, twin, b, request("c")], FACTS), builder.store) == built


def test_one_kernel_that_does_not_fit_its_spec_hides_no_other(builder: Builder) -> None:
    a, b = request("a"), request("b")
    builder(a, b)
    misfit = replace(a, signature=replace(SIGNATURE, args=(ArgSpec("x", "inout", DtypeRule("float32"), (Expr("N"),)),)))
    plan = make_plan([misfit, b], FACTS)
    misfits: dict[str, TkbuildError] = {}
    assert set(load_built(plan, builder.store, misfits.__setitem__)) == {b.variant}
    assert set(misfits) == {a.variant}
    warnings: list[str] = []
    builder.store.warn = warnings.append
    assert set(load_built(plan, builder.store)) == {b.variant}
    assert warnings == [f"{a.variant} is stored but does not fit its spec: {misfits[a.variant]}"]
    assert builder.store.gc(keep=needed_keys(plan, builder.store)) == []


def test_lowered_kernels_of_present_specs_are_needed_without_their_cubins(builder: Builder) -> None:
    builder(request("a"), request("gone"))
    plan = make_plan([request("a"), request("new")], FACTS)
    (step, _) = plan.steps
    for entry in list(builder.store.entries("cubins")):
        (entry.path / "kernel.cubin").write_bytes(b"")
        with pytest.warns(UserWarning, match="is damaged"):
            builder.store.get("cubins", entry.key)
    builder.store.gc(keep=needed_keys(plan, builder.store))
    assert [entry.key for entry in builder.store.entries()] == [step.key]

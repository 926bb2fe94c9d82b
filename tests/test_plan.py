"""The key: a row for each input that must change it, and one for each that must not."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from fake_toolkit import FakeToolkit
from spec_text import write_spec

from tkbuild.arch import TargetArch
from tkbuild.errors import ArgumentError
from tkbuild.facts import BuildFacts, build_facts
from tkbuild.plan import (
    BuildRequest,
    FieldChange,
    changed_fields,
    compile_step,
    make_plan,
    make_requests,
    shard,
)
from tkbuild.signature import KernelSignature
from tkbuild.specs import load_specs
from tkbuild.toolchain import TileLangPackage
from tkbuild.variants import expand

SM_90A, SM_100A = TargetArch.parse("sm_90a"), TargetArch.parse("sm_100a")
SIGNATURE = KernelSignature("quant.cast", "Casts.", "own", "cast")
REQUEST = BuildRequest(
    variant="quant.cast-bf16-sm_90a",
    arch=SM_90A,
    signature=SIGNATURE,
    axes={"dtype": "bfloat16"},
    source="kernel = 1\n",
    sources={"helpers.py": b"N = 1\n"},
    pass_configs={"tl.a": True, "tl.b": 1},
    extra_flags=("-DA", "-DB"),
    allow={"spill_bytes": 0},
)
FACTS = BuildFacts({"tilelang": "0.1.15 abc"}, {"cuda": "13.5.37", "cuda nvidia-nvvm": "def"})
CUDA = "__global__ void k() {}\n"


def lower_key(request: BuildRequest = REQUEST, facts: BuildFacts = FACTS) -> str:
    return make_plan([request], facts).steps[0].key


def compile_key(request: BuildRequest = REQUEST, facts: BuildFacts = FACTS, cuda: str = CUDA) -> str:
    return compile_step(cuda, request, facts).key


MUST_CHANGE_LOWERING: dict[str, Callable[[], str]] = {
    "source": lambda: lower_key(replace(REQUEST, source="kernel = 2\n")),
    "white space of the source": lambda: lower_key(replace(REQUEST, source="kernel = 1\n\n")),
    "content of a source file": lambda: lower_key(replace(REQUEST, sources={"helpers.py": b"N = 2\n"})),
    "name of a source file": lambda: lower_key(replace(REQUEST, sources={"other.py": b"N = 1\n"})),
    "another source file": lambda: lower_key(replace(REQUEST, sources={**REQUEST.sources, "b.py": b""})),
    "value of a pass config": lambda: lower_key(replace(REQUEST, pass_configs={"tl.a": False, "tl.b": 1})),
    "type of a pass config": lambda: lower_key(replace(REQUEST, pass_configs={"tl.a": 1, "tl.b": 1})),
    "another pass config": lambda: lower_key(replace(REQUEST, pass_configs={**REQUEST.pass_configs, "tl.c": 0})),
    "arch": lambda: lower_key(replace(REQUEST, arch=SM_100A)),
    "version or content of TileLang": lambda: lower_key(facts=replace(FACTS, lowering={"tilelang": "0.1.15 abd"})),
}
MUST_CHANGE_COMPILING: dict[str, Callable[[], str]] = {
    "CUDA source": lambda: compile_key(cuda=CUDA + "\n"),
    "fast math": lambda: compile_key(replace(REQUEST, pass_configs={"tl.enable_fast_math": True})),
    "register usage level": lambda: compile_key(replace(REQUEST, pass_configs={"tl.ptxas_register_usage_level": 3})),
    "other register usage level": lambda: compile_key(replace(REQUEST, pass_configs={"tl.ptxas_register_usage_level": 4})),
    "device compile flags": lambda: compile_key(replace(REQUEST, pass_configs={"tl.device_compile_flags": "-DC"})),
    "another flag": lambda: compile_key(replace(REQUEST, extra_flags=("-DA", "-DB", "-maxrregcount=64"))),
    "a flag less": lambda: compile_key(replace(REQUEST, extra_flags=("-DA",))),
    "order of flags": lambda: compile_key(replace(REQUEST, extra_flags=("-DB", "-DA"))),
    "flags glued together": lambda: compile_key(replace(REQUEST, extra_flags=("-DA=-DB",))),
    "arch": lambda: compile_key(replace(REQUEST, arch=SM_100A)),
    "compiler part": lambda: compile_key(facts=replace(FACTS, compiling={**FACTS.compiling, "cuda nvidia-nvvm": "xyz"})),
    "compiler release": lambda: compile_key(facts=replace(FACTS, compiling={**FACTS.compiling, "cuda": "13.5.38"})),
}
MUST_NOT_CHANGE_LOWERING: dict[str, Callable[[], str]] = {
    "order of pass configs": lambda: lower_key(replace(REQUEST, pass_configs={"tl.b": 1, "tl.a": True})),
    "extra compile flags": lambda: lower_key(replace(REQUEST, extra_flags=())),
    "compiler": lambda: lower_key(facts=replace(FACTS, compiling={"cuda": "12.9"})),
    "limits": lambda: lower_key(replace(REQUEST, allow={"spill_bytes": 8})),
    "name of the variant": lambda: lower_key(replace(REQUEST, variant="quant.cast-f16-sm_90a")),
    "signature": lambda: lower_key(replace(REQUEST, signature=replace(SIGNATURE, summary="Other."))),
    "launch mode": lambda: lower_key(replace(REQUEST, programmatic="on")),
}
MUST_NOT_CHANGE_COMPILING: dict[str, Callable[[], str]] = {
    "template with the same CUDA source": lambda: compile_key(replace(REQUEST, source="other")),
    "pass config without a flag": lambda: compile_key(replace(REQUEST, pass_configs={"tl.a": 5})),
    "TileLang with the same CUDA source and headers": lambda: compile_key(facts=replace(FACTS, lowering={"tilelang": "0.1.16"})),
    "limits": lambda: compile_key(replace(REQUEST, allow={"spill_bytes": 8})),
}


def test_every_input_that_must_change_the_key_does() -> None:
    lowering = {name: make() for name, make in MUST_CHANGE_LOWERING.items()}
    assert len({lower_key(), *lowering.values()}) == len(lowering) + 1, lowering
    compiling = {name: make() for name, make in MUST_CHANGE_COMPILING.items()}
    assert len({compile_key(), *compiling.values()}) == len(compiling) + 1, compiling
    assert compile_key() != lower_key()


@pytest.mark.parametrize("name", MUST_NOT_CHANGE_LOWERING)
def test_lowering_key_ignores(name: str) -> None:
    assert MUST_NOT_CHANGE_LOWERING[name]() == lower_key()


@pytest.mark.parametrize("name", MUST_NOT_CHANGE_COMPILING)
def test_compiling_key_ignores(name: str) -> None:
    assert MUST_NOT_CHANGE_COMPILING[name]() == compile_key()


def test_every_field_of_a_request_is_in_a_key_or_known_not_to_be() -> None:
    keyed = {"source", "sources", "pass_configs", "arch", "extra_flags"}
    not_keyed = {"variant", "signature", "axes", "allow", "programmatic"}
    assert {field.name for field in dataclasses.fields(BuildRequest)} == keyed | not_keyed


def test_plan_needs_no_compiler_stack_and_no_hash_seed() -> None:
    code = (
        "import sys; sys.path.insert(0, 'tests'); import test_plan as t; print(t.lower_key(), t.compile_key());"
        "assert not {'torch', 'tilelang', 'tvm', 'tvm_ffi', 'fsspec'} & set(sys.modules)"
    )
    root = Path(__file__).parent.parent
    printed = set()
    for seed, zone in (("0", "UTC"), ("7", "Asia/Tokyo")):
        env = {**os.environ, "PYTHONHASHSEED": seed, "TZ": zone, "CPATH": f"/{seed}", "LC_ALL": "C", "PYTHONPATH": str(root)}
        printed.add(
            subprocess.run([sys.executable, "-c", code], cwd=root, env=env, check=True, capture_output=True, text=True).stdout
        )
    assert printed == {f"{lower_key()} {compile_key()}\n"}


def test_equal_sources_are_lowered_once() -> None:
    other = replace(REQUEST, variant="quant.cast-f16-sm_90a", axes={"dtype": "float16"}, extra_flags=())
    plan = make_plan([REQUEST, other, replace(REQUEST, variant="c", source="kernel = 3")], FACTS)
    assert [step.variants for step in plan.steps] == [("c",), ("quant.cast-bf16-sm_90a", "quant.cast-f16-sm_90a")]
    assert set(plan.variants) == {"c", "quant.cast-bf16-sm_90a", "quant.cast-f16-sm_90a"}


def test_plan_does_not_depend_on_the_order_of_requests() -> None:
    requests = [replace(REQUEST, variant=f"v{i}", source=f"kernel = {i // 2}") for i in range(10)]
    assert make_plan(requests, FACTS) == make_plan(reversed(requests), FACTS)


def test_refused_flags_stop_the_plan() -> None:
    with pytest.raises(ArgumentError, match="-lineinfo"):
        make_plan([replace(REQUEST, extra_flags=("-lineinfo",))], FACTS)


@pytest.mark.parametrize("count", [1, 2, 3, 8])
def test_shards_are_disjoint_and_whole(count: int) -> None:
    plan = make_plan([replace(REQUEST, variant=f"v{i}", source=f"kernel = {i}") for i in range(40)], FACTS)
    parts = [shard(plan, index, count) for index in range(1, count + 1)]
    assert sorted(variant for part in parts for variant in part.variants) == sorted(plan.variants)
    smaller = make_plan([replace(REQUEST, variant=f"v{i}", source=f"kernel = {i}") for i in range(20)], FACTS)
    assert set(shard(smaller, 1, count).variants) <= set(parts[0].variants), "other kernels do not move a step to another part"


@pytest.mark.parametrize(("index", "count"), [(0, 2), (3, 2), (1, 0), (-1, 2)])
def test_bad_shards(index: int, count: int) -> None:
    with pytest.raises(ArgumentError, match="expected I/N"):
        shard(make_plan([REQUEST], FACTS), index, count)


def test_changed_fields_name_what_differs() -> None:
    before = make_plan([REQUEST], FACTS).steps[0].fields
    now = (
        make_plan([replace(REQUEST, pass_configs={"tl.a": True, "tl.c": 2})], replace(FACTS, lowering={"tilelang": "x"}))
        .steps[0]
        .fields
    )
    assert changed_fields(before, now) == [
        FieldChange("pass configs.tl.b", 1, None),
        FieldChange("pass configs.tl.c", None, 2),
        FieldChange("tilelang", "0.1.15 abc", "x"),
    ]
    assert changed_fields(before, before) == []


@pytest.mark.toolchain
def test_facts_hold_no_path(tmp_path: Path) -> None:
    package = TileLangPackage("0.1.15", "d1", "d2", (tmp_path / "include",))
    facts = build_facts(FakeToolkit.create(tmp_path / "cuda").toolchain(), package)
    assert facts.lowering["tilelang"] == "0.1.15 d1"
    assert facts.compiling["tilelang headers"] == "d2"
    assert facts.compiling["cuda"] == "13.5.37"
    assert str(tmp_path) not in str(facts)


def test_requests_of_a_spec(tmp_path: Path) -> None:
    write_spec(tmp_path)
    (spec,) = load_specs(tmp_path).values()
    requests = make_requests(expand(spec, [SM_90A]))
    assert {request.variant for request in requests} == {variant.id for variant in expand(spec, [SM_90A])}
    assert requests[0].sources == {"helpers.py": (tmp_path / "helpers.py").read_bytes()}
    before = {request.variant: lower_key(request) for request in requests}
    (tmp_path / "helpers.py").write_text("CHANGED = 1\n")
    (tmp_path / "unrelated.txt").write_text("x")
    after = {request.variant: lower_key(request) for request in make_requests(expand(spec, [SM_90A]))}
    assert all(before[variant] != after[variant] for variant in before)

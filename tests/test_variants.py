"""variants: expansion, ids that parse back, patterns that select something or say why not, profiles."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from spec_text import changed, write_spec

from tkbuild.arch import TargetArch
from tkbuild.errors import PatternError, SpecError
from tkbuild.kernelspec import KernelSpec, Profile
from tkbuild.specs import load_spec, load_specs
from tkbuild.variants import Variant, expand, parse_id, select

SM90A, SM100A = TargetArch(9, 0, "a"), TargetArch(10, 0, "a")
COMBINATIONS = 2 * 3 * 3 * 2
OTHER = "spec: 1\nkernel: moe.gate\nsummary: s\nargs: {x: {role: inout, dtype: int8, shape: [N]}}\ntargets: {sm_90a: {}}\n"


@pytest.fixture(scope="module")
def specs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, KernelSpec]:
    folder = tmp_path_factory.mktemp("specs")
    write_spec(folder)
    (folder / "gate.yaml").write_text(OTHER)
    (folder / "gate.py.j2").write_text("kernel = 1\n")
    return load_specs(folder)


def test_expansion_takes_every_combination_that_the_constraints_admit(specs: dict[str, KernelSpec]) -> None:
    variants = expand(specs["quant.cast"])
    assert len(variants) == len({variant.id for variant in variants}) == 2 * COMBINATIONS
    assert not any(variant.axes["packed"] and variant.axes["sf_format"] == "f32" for variant in variants)
    assert variants[0].id == "quant.cast-bf16-b32-f32-packed0-e64-sm_90a"
    assert variants == sorted(variants)
    assert [variant.arch for variant in expand(specs["quant.cast"], [SM100A])] == [SM100A] * COMBINATIONS
    assert expand(specs["moe.gate"], [SM100A]) == []


def test_ids_parse_back(specs: dict[str, KernelSpec]) -> None:
    for variant in select(specs):
        again = parse_id(variant.id, specs)
        assert again == variant
        assert (again.axes, again.arch, again.spec, again.target) == (variant.axes, variant.arch, variant.spec, variant.target)


@pytest.mark.parametrize(
    ("text", "telling"),
    [
        ("quant.cst-bf16-b32-f32-packed0-e64-sm_90a", "did you mean quant.cast?"),
        ("quant.cast-bf16-b32-f32-packed0-sm_90a", "expected quant.cast-<in_dtype>-<block>-<sf_format>-<packed>-<cap>-<arch>"),
        ("quant.cast-bf16-b48-f32-packed0-e64-sm_90a", "block 'b48' is not built; did you mean"),
        ("quant.cast-bf16-32-f32-packed0-e64-sm_90a", "built: b32, b64, b128"),
        ("quant.cast-bf16-b32-f32-packed1-e64-sm_90a", "only ue8m0 scales are packed"),
        ("quant.cast-bf16-b32-f32-packed0-e64-sm_120a", "no target sm_120a; it has sm_90a, sm_100a"),
        ("quant.cast-bf16-b32-f32-packed0-e64-sm90a", "did you mean sm_90a?"),
        ("moe.gate", "is no target arch"),
        ("", "unknown kernel"),
    ],
)
def test_wrong_ids_say_which_part_is_wrong(specs: dict[str, KernelSpec], text: str, telling: str) -> None:
    with pytest.raises(PatternError) as caught:
        parse_id(text, specs)
    assert telling in str(caught.value)


@given(data=st.data())
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_text_that_parses_is_the_id_of_what_it_names(specs: dict[str, KernelSpec], data: st.DataObject) -> None:
    parts = ["quant.cast", "moe.gate", "bf16", "f32", "b32", "b064", "ue8m0", "packed1", "packed0", "e64", "sm_90a", "90a", "9.0a"]
    text = "-".join(data.draw(st.lists(st.sampled_from(parts), min_size=1, max_size=8)))
    try:
        variant = parse_id(text, specs)
    except PatternError:
        return
    assert variant.id.rpartition("-")[0] == text.rpartition("-")[0]


@pytest.mark.parametrize(
    ("patterns", "archs", "count"),
    [
        ([], [], 2 * COMBINATIONS + 1),
        (["*"], [SM90A], COMBINATIONS + 1),
        (["quant.*"], [], 2 * COMBINATIONS),
        (["*@sm_100a"], [], COMBINATIONS),
        (["quant.cast@90a", "quant.cast"], [], 2 * COMBINATIONS),
        (["@sm_90a"], [], COMBINATIONS + 1),
        (["moe.gate-sm_90a", "moe.*"], [], 1),
        (["*-bf16-b32-*"], [SM90A], 6),
    ],
)
def test_patterns(specs: dict[str, KernelSpec], patterns: list[str], archs: list[TargetArch], count: int) -> None:
    chosen = select(specs, patterns, archs)
    assert len(chosen) == len(set(chosen)) == count
    assert chosen == sorted(chosen)


@pytest.mark.parametrize(
    ("pattern", "archs", "telling"),
    [
        ("quant.cats", [], "did you mean quant.cast"),
        ("*@sm_120a", [], "has `targets` for sm_90a, sm_100a, none is for sm_120a; add it"),
        ("moe.gate", [SM100A], "has `targets` for sm_90a, none is for sm_100a; add it"),
        ("*@sm_90a", [SM100A, TargetArch(12, 0, "a")], "none is for sm_90a and sm_100a or sm_120a"),
        ("*@sm90a", [], "did you mean sm_90a?"),
        ("", [], "selects nothing"),
    ],
)
def test_patterns_that_select_nothing_are_errors(
    specs: dict[str, KernelSpec], pattern: str, archs: list[TargetArch], telling: str
) -> None:
    with pytest.raises(PatternError) as caught:
        select(specs, ["quant.*", pattern], archs)
    assert telling in str(caught.value)
    assert caught.value.pattern == pattern


def profile(kernels: tuple[str, ...] = ("*",), **axes: tuple[object, ...]) -> Profile:
    return Profile("p", Path("p.yaml"), kernels, {"quant.cast": axes} if axes else {})  # type: ignore[dict-item]


def ids(variants: list[Variant]) -> list[str]:
    return [variant.id for variant in variants]


def test_a_profile_restricts_kernels_and_axis_values(specs: dict[str, KernelSpec]) -> None:
    assert ids(select(specs, profile=profile(("moe.*",)))) == ["moe.gate-sm_90a"]
    small = select(specs, ["quant.*"], [SM90A], profile(block=(32,), packed=(True,), in_dtype=("bfloat16",)))
    assert ids(small) == [f"quant.cast-bf16-b32-ue8m0-packed1-e{cap}-sm_90a" for cap in (64, 256)]
    whole_id = "quant.cast-bf16-b128-f32-packed0-e64-sm_90a"
    assert ids(select(specs, [whole_id], profile=profile(("moe.*",)))) == [whole_id]
    with pytest.raises(PatternError, match="selects only variants that the profile leaves out"):
        select(specs, ["quant.*"], profile=profile(("moe.*",)))


@pytest.mark.parametrize(
    ("given_profile", "telling"),
    [
        (profile(("qant.*",)), "kernels: 'qant.*' selects nothing"),
        (profile(blok=(32,)), "did you mean block?"),
        (profile(block=(48,)), "48 is no value; values: 32, 64, 128"),
        (profile(packed=(1,)), "1 is no value; values: false, true"),
        (profile(sf_format=("f32",), packed=(True,)), "no variant has all of these values"),
        (Profile("p", Path("p.yaml"), ("*",), {"quant.cst": {}}), "did you mean quant.cast?"),
    ],
)
def test_a_profile_that_does_not_fit_the_specs_is_refused(
    specs: dict[str, KernelSpec], given_profile: Profile, telling: str
) -> None:
    with pytest.raises(SpecError) as caught:
        select(specs, profile=given_profile)
    assert telling in str(caught.value)


def test_run_time_sizes_do_not_multiply_variants(tmp_path: Path) -> None:
    many = changed("T: [1, 31]", "T: [1, 2, 3, 127, 128, 4096]")
    assert ids(expand(load_spec(write_spec(tmp_path, many)))) == ids(expand(load_spec(write_spec(tmp_path))))


def test_a_profile_is_judged_without_regard_to_archs(specs: dict[str, KernelSpec]) -> None:
    chosen = select(specs, archs=[SM100A], profile=profile(("moe.gate", "quant.cast")))
    assert {(variant.kernel, variant.arch) for variant in chosen} == {("quant.cast", SM100A)}
    with pytest.raises(PatternError, match=r"'moe.gate' has `targets` for sm_90a"):
        select(specs, ["moe.gate"], [SM100A], profile(("moe.gate", "quant.cast")))

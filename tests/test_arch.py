"""arch: the grammar, the order, and the rule which device runs what."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tkbuild.arch import SUPPORTED, TargetArch, archs_for, best_first, least_toolkit, target_profile
from tkbuild.errors import ArgumentError


def parse(*texts: str) -> list[TargetArch]:
    return [TargetArch.parse(text) for text in texts]


@pytest.mark.parametrize(
    ("text", "canonical"),
    [("sm_90a", "sm_90a"), ("90a", "sm_90a"), ("9.0a", "sm_90a"), ("sm_100f", "sm_100f"), ("10.3a", "sm_103a"), ("sm_90", "sm_90")],
)
def test_accepted_spellings(text: str, canonical: str) -> None:
    assert str(TargetArch.parse(text)) == canonical


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("9.0.a", "did you mean sm_90a?"),
        ("sm90a", "did you mean sm_90a?"),
        ("SM_90 A", "did you mean sm_90a?"),
        ("compute_90a", "did you mean sm_90a?"),
        (9.0, "did you mean sm_90?"),
        (100, "did you mean sm_100?"),
        ("90aa", "expected sm_"),
        ("9a", "expected sm_"),
        ("1000", "expected sm_"),
        ("", "expected sm_"),
        (None, "expected sm_"),
        (True, "expected sm_"),
        ("-90", "expected sm_"),
        ("sm_090a", "expected sm_"),
        ("sm_90a\n", "did you mean sm_90a?"),
        ("sm_\u0669\u0660a", "expected sm_"),
        ("sm_80a", "suffix 'a' exists from sm_90 on"),
        ("sm_90f", "'f' from sm_100 on"),
    ],
)
def test_refused_spellings_say_what_is_right(text: object, hint: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        TargetArch.parse(text)
    assert hint in str(caught.value)


ARCHS = st.builds(
    TargetArch, st.integers(10, 99), st.integers(0, 9), st.sampled_from(["", "a", "f"])
) | st.builds(TargetArch, st.just(9), st.integers(0, 9), st.sampled_from(["", "a"]))  # fmt: skip


@given(ARCHS)
def test_the_canonical_form_parses_back(arch: TargetArch) -> None:
    assert TargetArch.parse(str(arch)) == arch
    assert TargetArch.parse(f"{arch.major}.{arch.minor}{arch.suffix}") == arch


@given(st.text(max_size=12))
def test_any_text_parses_to_itself_or_is_refused(text: str) -> None:
    try:
        arch = TargetArch.parse(text)
    except ArgumentError:
        return
    assert text in (str(arch), str(arch)[3:], f"{arch.major}.{arch.minor}{arch.suffix}")


def test_the_order_is_numeric() -> None:
    ordered = parse("sm_90", "sm_90a", "sm_100a", "sm_100f", "sm_103a", "sm_120a")
    shuffled = random.Random(1).sample(ordered, len(ordered))
    assert sorted(shuffled) == ordered


@pytest.mark.parametrize(
    ("arch", "runs", "does_not"),
    [
        ("sm_90a", [(9, 0)], [(9, 1), (8, 9), (10, 0)]),
        ("sm_90", [(9, 0), (9, 1)], [(8, 9), (10, 0)]),
        ("sm_100a", [(10, 0)], [(10, 3), (9, 0), (11, 0)]),
        ("sm_100f", [(10, 0), (10, 3)], [(9, 0), (11, 0), (12, 0)]),
        ("sm_103f", [(10, 3)], [(10, 0)]),
        ("sm_120a", [(12, 0)], [(12, 1), (10, 0)]),
    ],
)
def test_which_device_runs_what(arch: str, runs: list[tuple[int, int]], does_not: list[tuple[int, int]]) -> None:
    assert all(TargetArch.parse(arch).runs_on(capability) for capability in runs)
    assert not any(TargetArch.parse(arch).runs_on(capability) for capability in does_not)


def test_the_exact_target_comes_first_then_the_nearest_family() -> None:
    built = parse("sm_100a", "sm_100f", "sm_90a", "sm_103a", "sm_100", "sm_103f", "sm_103")
    assert best_first(built, (10, 3)) == parse("sm_103a", "sm_103f", "sm_100f", "sm_103", "sm_100")
    assert best_first(parse("sm_100a"), (10, 3)) == []


def test_what_a_device_needs_is_named() -> None:
    assert archs_for((10, 3)) == parse("sm_103a", "sm_100f")
    assert archs_for((9, 0)) == parse("sm_90a")
    assert archs_for((8, 9)) == parse("sm_89")


@given(ARCHS.flatmap(lambda arch: st.just((arch.major, arch.minor))))
def test_what_is_named_runs_there(capability: tuple[int, int]) -> None:
    assert all(arch.runs_on(capability) for arch in archs_for(capability))


def test_profiles_and_toolkits_cover_the_supported_archs() -> None:
    assert [str(arch) for arch in SUPPORTED] == ["sm_90a", "sm_100a", "sm_100f", "sm_103a", "sm_120a"]
    for arch in SUPPORTED:
        profile = target_profile(arch)
        assert profile.arch == str(arch)
        assert profile.smem_per_block < profile.smem_per_sm
    assert target_profile(TargetArch.parse("sm_90a")).smem_per_block == 232448
    assert least_toolkit(TargetArch.parse("sm_103a")) == (12, 9)


def test_an_arch_without_its_suffix_is_refused_before_any_compiler() -> None:
    with pytest.raises(ArgumentError, match=r"does not compile for sm_90; did you mean sm_90a\?"):
        target_profile(TargetArch.parse("sm_90"))

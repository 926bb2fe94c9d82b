"""Selection: exact archs, axes, rules, and the text that says what to do."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from runtime.providers import cast_signature, write_provider

from tkbuild.errors import NoVariantError
from tkbuild.runtime.registry import Registry, read_registry
from tkbuild.runtime.select import Request, select, select_or_raise

HOPPER = Request({"in_dtype": "bfloat16", "block": 128}, {"cap": 256}, (9, 0), "cuda:0")


@pytest.fixture
def hopper(tmp_path: Path) -> Registry:
    return read_registry([write_provider(tmp_path / "90", cast_signature())])


def both(tmp_path: Path, *archs: str) -> Registry:
    return read_registry([write_provider(tmp_path / arch, cast_signature(), arch) for arch in archs])


def choose(registry: Registry, request: Request) -> str | None:
    found = select(cast_signature(), registry.variants["quant.cast"], request).variant
    return found.id if found else None


def test_takes_the_variant_of_all_axes(hopper: Registry) -> None:
    assert choose(hopper, HOPPER) == "quant.cast-bfloat16-128-256-sm_90a"


@pytest.mark.parametrize(("hidden", "capacity"), [(1, 256), (256, 256), (257, 1024), (1024, 1024)])
def test_at_least_takes_the_smallest_that_fits(hopper: Registry, hidden: int, capacity: int) -> None:
    assert choose(hopper, replace(HOPPER, chosen={"cap": hidden})) == f"quant.cast-bfloat16-128-{capacity}-sm_90a"


def test_every_candidate_has_a_verdict(hopper: Registry) -> None:
    selection = select(cast_signature(), hopper.variants["quant.cast"], HOPPER)
    assert len(selection.trace) == 8
    assert [verdict.variant.id for verdict in selection.trace if not verdict.reason] == ["quant.cast-bfloat16-128-256-sm_90a"]


def test_error_lists_candidates_and_the_line_to_add(hopper: Registry) -> None:
    with pytest.raises(NoVariantError) as caught:
        select_or_raise(cast_signature(), hopper.variants["quant.cast"], replace(HOPPER, axes={"in_dtype": "float16", "block": 64}))
    text = str(caught.value)
    assert "no variant of 'quant.cast' fits this call on cuda:0 (compute capability 9.0)" in text
    assert "rejected: x is float16, built for bfloat16" in text
    assert "add in_dtype: float16; block: 64 to the axes of kernel_specs/quant/cast.yaml" in text
    assert caught.value.kernel == "quant.cast"
    assert caught.value.capability == (9, 0)


def test_no_capacity_large_enough(hopper: Registry) -> None:
    with pytest.raises(NoVariantError, match=r"cap is 1024, it must be at least H = 4096"):
        select_or_raise(cast_signature(), hopper.variants["quant.cast"], replace(HOPPER, chosen={"cap": 4096}))


def test_10_3_does_not_take_100a(tmp_path: Path) -> None:
    registry = both(tmp_path, "sm_100a")
    with pytest.raises(NoVariantError, match=r"have sm_100a; need sm_103a or sm_100f"):
        select_or_raise(cast_signature(), registry.variants["quant.cast"], replace(HOPPER, capability=(10, 3)))


@pytest.mark.parametrize(
    ("capability", "advice"),
    [
        ((10, 0), r"need sm_100a or sm_100f: pip install --no-deps .* tkbuild-kernels-sm100a .*`tkbuild package --arch sm_100a`"),
        ((12, 0), r"need sm_120a: pip install"),
        ((8, 0), r"does not support GPUs of compute capability 8\.0; it compiles for sm_90a, "),
    ],
)
def test_advice_names_archs_that_tkbuild_compiles_for(hopper: Registry, capability: tuple[int, int], advice: str) -> None:
    with pytest.raises(NoVariantError, match=f"have sm_90a; .*{advice}"):
        select_or_raise(cast_signature(), hopper.variants["quant.cast"], replace(HOPPER, capability=capability))


def test_family_target_crosses_minor_and_exact_is_preferred(tmp_path: Path) -> None:
    request = replace(HOPPER, capability=(10, 3))
    assert choose(both(tmp_path, "sm_100a", "sm_100f"), request) == "quant.cast-bfloat16-128-256-sm_100f"
    assert choose(both(tmp_path, "sm_100a", "sm_100f", "sm_103a"), request) == "quant.cast-bfloat16-128-256-sm_103a"


def test_devices_of_one_host_each_get_their_own(tmp_path: Path) -> None:
    registry = both(tmp_path, "sm_90a", "sm_100a")
    ids = [choose(registry, replace(HOPPER, capability=c)) for c in ((9, 0), (10, 0), (9, 0), (12, 0))]
    assert ids == [
        "quant.cast-bfloat16-128-256-sm_90a",
        "quant.cast-bfloat16-128-256-sm_100a",
        "quant.cast-bfloat16-128-256-sm_90a",
        None,
    ]

"""What a launch plan refuses: sizes that no device of the arch can launch."""

from __future__ import annotations

from typing import Any

import pytest
from runtime.providers import FACTS, cast_signature

from tkbuild.errors import LowerError
from tkbuild.launchplan import make_launch_plan

AXES = {"in_dtype": "bfloat16", "block": 128, "cap": 256}


def planned(arch: str = "sm_90a", **sizes: Any) -> Any:
    facts = {**FACTS, "launches": [{**FACTS["launches"][0], **sizes}]}
    return make_launch_plan(cast_signature(), variant="quant.cast-sm_90a", arch=arch, axes=AXES, launch_facts=facts)


@pytest.mark.parametrize(
    ("sizes", "text"),
    [
        ({"block": [3000, 1, 1]}, "3000 threads, sm_90a has at most 1024"),
        ({"block": [64, 32, 1]}, "2048 threads"),
        ({"cluster": [4, 8, 1]}, "32 CTAs of a cluster, sm_90a has at most 16"),
        ({"dynamic_smem_bytes": 232449}, "232449 bytes of dynamic shared memory, sm_90a has at most 232448"),
    ],
)
def test_sizes_beyond_the_arch_are_refused(sizes: dict[str, Any], text: str) -> None:
    with pytest.raises(LowerError, match=text):
        planned(**sizes)


def test_the_largest_sizes_and_those_of_a_call_are_planned() -> None:
    planned(block=[1024, 1, 1], cluster=[16, 1, 1], dynamic_smem_bytes=232448)
    planned(block=[["*", "H", 2], 1, 1], dynamic_smem_bytes="T")


def test_the_limit_is_that_of_the_arch() -> None:
    with pytest.raises(LowerError, match="sm_120a has at most 101376"):
        planned("sm_120a", dynamic_smem_bytes=150000)

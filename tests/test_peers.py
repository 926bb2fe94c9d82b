"""peers: the calls of the benchmark fit the public functions that they name, in both releases. What they compute is for a GPU."""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tkbuild import ops, peers
from tkbuild.arch import TargetArch
from tkbuild.cases import Call, complete_values, make_call
from tkbuild.kernelspec import KernelSpec
from tkbuild.ops import v1
from tkbuild.specs import load_specs
from tkbuild.variants import expand

SPECS = load_specs(Path(__file__).parents[1] / "kernel_specs")
SM_90A = TargetArch.parse("sm_90a")
LARGEST = 50_000  # elements of a tensor
CALLS = 4  # of a variant


def calls(spec: KernelSpec) -> Iterator[Call]:
    generator = torch.Generator().manual_seed(0)
    for variant in expand(spec, [SM_90A]):
        found = 0
        for case in spec.verify.cases if spec.verify else ():
            for given in itertools.islice(case.calls(variant.axes), 64):
                values = complete_values(spec.signature, given, variant.axes)
                sizes = [torch.Size([int(e.evaluate(values)) for e in arg.shape]).numel() for arg in spec.signature.args]
                if case.large or max(sizes) > LARGEST or found == CALLS:
                    continue
                found += 1
                yield make_call(spec.signature, values, {**spec.verify.inputs, **(case.inputs or {})}, generator)


@pytest.mark.parametrize("kernel", sorted(peers.PUBLIC_CALLS))
def test_calls_fit_the_functions(kernel: str) -> None:
    """All calls by the names of the last release, and in any release at least one."""
    found = 0
    for call in calls(SPECS[kernel]):
        with contextlib.suppress(AttributeError):
            thunk = peers.PUBLIC_CALLS[kernel](ops, list(call.input_views), call.values)
            if isinstance(thunk, functools.partial):
                inspect.signature(thunk.func).bind(*thunk.args, **thunk.keywords)
        found += any(peers.peer_thunk(kernel, api, call) for api in (ops, v1))
    assert found


@pytest.mark.parametrize(
    "kernel", sorted(k for k, call in peers.FIRST_RELEASE_CALLS.items() if call is not peers.PUBLIC_CALLS.get(k))
)
def test_what_the_first_release_spells_differently_fits(kernel: str) -> None:
    assert any(peers.peer_thunk(kernel, v1, call) for call in calls(SPECS[kernel]))


def test_what_a_release_lacks_has_no_call() -> None:
    (call, *_) = calls(SPECS["moe.moe_topk_gate_backward"])
    assert peers.peer_thunk("moe.moe_topk_gate_backward", ops, call)
    assert peers.peer_thunk("moe.moe_topk_gate_backward", v1, call) is None
    with_e4m3_scales = next(c for c in calls(SPECS["quant.per_token_cast"]) if c.values["sf_format"] == "e4m3")
    assert peers.peer_thunk("quant.per_token_cast", ops, with_e4m3_scales)
    assert peers.peer_thunk("quant.per_token_cast", v1, with_e4m3_scales) is None

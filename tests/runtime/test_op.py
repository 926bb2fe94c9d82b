"""The way of a call, as far as it goes without a device: binding, allocation, and what is refused before the driver."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from runtime.providers import cast_signature, write_provider

from tkbuild.errors import ArgumentError, IntegrityError, LaunchError
from tkbuild.expr import Expr
from tkbuild.runtime import op, torch_ops
from tkbuild.runtime.op import (
    Allocation,
    CallPlan,
    KernelOp,
    allocations,
    bind,
    call_axes,
    check_driver,
    kernel_op,
    load,
    new_empty,
    view_of,
)
from tkbuild.runtime.registry import InstalledVariant, read_registry
from tkbuild.signature import ArgSpec, DtypeRule


@pytest.fixture
def variant(tmp_path: Path) -> InstalledVariant:
    return read_registry([write_provider(tmp_path / "kernels", cast_signature(), toolchain={"cuda": "13.5.37"})]).all_variants()[0]


def test_bind_reads_shapes_strides_and_values() -> None:
    x = torch.empty(5, 256, dtype=torch.bfloat16)[:, :128]
    values = bind(cast_signature(), (x,), (32, False), (1,))
    assert values == {"block": 32, "col_major": False, "round_sf": 1, "T": 5, "H": 128, "ld": 256}
    assert call_axes(cast_signature(), (x,), (32, False)) == {"block": 32, "in_dtype": "bfloat16"}


@pytest.mark.parametrize(
    ("tensors", "static", "scalars", "text"),
    [
        ((torch.empty(4),), (32, False), (0,), "x has 1 dimensions, expected 2"),
        ((), (32, False), (0,), "0 tensors, expected 1"),
        ((torch.empty(4, 64),), (32,), (0,), "1 values, expected 2"),
        ((torch.empty(4, 64),), (32, False), (), "0 scalars, expected 1"),
        ((torch.empty(4, 64),), (32.0, False), (0,), "block is 32.0, expected a whole number"),
        ((torch.empty(4, 64),), (32, None), (0,), "col_major is None, expected True or False"),
    ],
)
def test_bind_names_what_is_wrong(tensors, static, scalars, text: str) -> None:
    with pytest.raises(ArgumentError, match=text):
        bind(cast_signature(), tensors, static, scalars)


def test_dtype_outside_the_spec() -> None:
    with pytest.raises(ArgumentError, match="x is float16, expected one of bfloat16, float32"):
        call_axes(cast_signature(), (torch.empty(4, 64, dtype=torch.float16),), (32, False))


def test_outputs_follow_the_signature() -> None:
    values = {"T": 5, "H": 100, "block": 32, "in_dtype": "float32", "cap": 256}
    out, sf = allocations(cast_signature(), values)
    assert out == Allocation((5, 100), (100, 1), torch.float8_e4m3fn, 500)
    assert sf == Allocation((5, 4), (4, 1), torch.float32, 20)


def test_an_output_of_negative_size_is_refused() -> None:
    with pytest.raises(ArgumentError, match=r"quant\.cast: sf would have the size ceildiv\(H, block\) = -2, expected 0 or more"):
        allocations(cast_signature(), {"T": 5, "H": 64, "block": -32, "in_dtype": "float32", "cap": 256})


@pytest.mark.parametrize("current", [0, 1])
def test_outputs_are_on_the_device_of_the_plan(monkeypatch: pytest.MonkeyPatch, current: int) -> None:
    monkeypatch.setattr(op, "_current_device", lambda: current)
    out = Allocation((2, 3), (3, 1), torch.float32, 6)
    on_current = torch.empty(1)
    plan = CallPlan(lambda: None, torch.device("cpu", 0), (out,), (lambda: on_current,), ())
    (made,) = plan.allocate()
    assert (made is on_current) == (current == 0)
    assert made.device.type == "cpu"


@pytest.mark.parametrize(("storage", "whole"), [(20, True), (32, False)])
def test_allocation_covers_its_storage(storage: int, whole: bool) -> None:
    made = Allocation((5, 4), (1, 8) if not whole else (4, 1), torch.float32, storage).maker(torch.device("cpu"))()
    assert made.shape == (5, 4)
    assert made.untyped_storage().nbytes() == storage * 4


def test_a_shape_that_earlier_tensors_bind_is_not_read_for_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    signature = cast_signature()
    x, *outs = signature.args
    t, h = Expr.parse("T"), Expr.parse("H")
    plain, optional = (ArgSpec(name, "in", DtypeRule("float32"), (t, h), optional=name == "b") for name in ("a", "b"))
    x = replace(x, strides=None)
    for args, deciding in (((x, plain, optional), [0]), ((plain, x), [0, 1]), ((optional, plain, x), [0, 1, 2])):
        monkeypatch.setattr(KernelOp, "signature", replace(signature, args=(*args, *outs)))
        assert [position for position, _ in KernelOp("quant.cast")._deciding] == deciding


def test_a_view_of_part_of_a_tensor() -> None:
    whole = torch.arange(120.0).view(4, 5, 6)[1:].requires_grad_()
    for view in (view_of, op._as_strided):
        part = view(whole, (3, 6), (30, 1), 24)
        assert part.equal(whole[:, 4])
        assert not part.requires_grad


@pytest.mark.parametrize("size", [(), (3,), (3, 4, 5), (3, 0, 5)])
def test_a_new_tensor_is_contiguous(size: tuple[int, ...]) -> None:
    made = new_empty(torch.empty(1), size, torch.bfloat16)
    assert (made.shape, made.dtype, made.stride()) == (size, torch.bfloat16, op.contiguous_strides(size))


class Weight(torch.nn.Parameter):
    """As frameworks derive theirs: torch hands it to an op's implementation as it is."""


def test_a_subclass_of_a_tensor_is_dispatched_once(monkeypatch: pytest.MonkeyPatch) -> None:
    signature = replace(cast_signature(), kernel="quant.cast_of_a_subclass")
    one = kernel_op(signature.kernel)
    implementation = torch_ops._cuda_implementation(signature)
    launched, outs = [], (torch.empty(0),)
    plan = CallPlan(lambda *given: launched.append(given), torch.device("cpu"), (), (), ())
    monkeypatch.setattr(KernelOp, "signature", signature)
    monkeypatch.setattr(one, "_plan", lambda *_given: plan)
    monkeypatch.setattr(plan.__class__, "allocate", lambda _plan: outs)
    one.keywords = ("block", "col_major", "round_sf")
    one.dispatched = lambda *args, **keywords: implementation(*args, **keywords)
    weight = Weight(torch.ones(4, 64))
    assert one((weight,), (32, False), (1,)) is outs[0]
    assert [given[0] is weight for given in launched] == [True]


@pytest.mark.parametrize("driver", [(13, 0), (13, 5), (14, 0)])
def test_driver_of_the_same_major_or_newer_is_fine(variant: InstalledVariant, driver: tuple[int, int]) -> None:
    check_driver(variant, driver)


def test_older_driver_is_refused_with_both_versions(variant: InstalledVariant) -> None:
    with pytest.raises(LaunchError, match=r"built by CUDA 13\.5\.37, the driver supports CUDA 12\.4"):
        check_driver(variant, (12, 4))


def test_cubin_that_is_none_is_refused_before_the_driver(variant: InstalledVariant) -> None:
    content = b"no cubin"
    (variant.root / "none.cubin").write_bytes(content)
    record = replace(variant.record, cubin="none.cubin", sha256=hashlib.sha256(content).hexdigest())
    with pytest.raises(IntegrityError, match=r"none\.cubin: .*; reinstall the kernel wheel"):
        load(replace(variant, id="another", record=record))

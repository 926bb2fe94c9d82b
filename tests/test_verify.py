"""verify: what it notices of a call, with a kernel of Python and tensors on the CPU."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tkbuild import verify
from tkbuild.cases import GUARD_BYTES, Call, GuardedTensor, make_call
from tkbuild.checks import Tolerance
from tkbuild.expr import Expr
from tkbuild.signature import ArgSpec, DtypeRule, KernelSignature

ROLES = {"x": "in", "kept": "in", "ws": "workspace", "out": "out"}


def signature() -> KernelSignature:
    size = (Expr.parse("T"),)
    strides = (Expr.parse("step"),)
    args = tuple(
        ArgSpec(name, role, DtypeRule("float32"), size, strides if name == "kept" else None) for name, role in ROLES.items()
    )
    return KernelSignature("t.copy", "copies", "", "t_copy", args=args)


def finding(monkeypatch: pytest.MonkeyPatch, extra: Callable[[Call], object], step: int = 1) -> str:
    """What `verify` says of a kernel that copies x to out and then does ``extra``."""
    call = make_call(signature(), {"T": 4, "step": step}, {}, torch.Generator())

    def kernel(x: torch.Tensor, kept: torch.Tensor, ws: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(x)
        extra(call)

    monkeypatch.setattr(verify, "load", lambda variant: kernel)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(verify, "reference_function", lambda name: lambda x, kept, ws: x)
    return verify._run(None, call, "t.copy", {"out": Tolerance()})  # type: ignore[arg-type]


@pytest.mark.parametrize("step", [1, 3])
def test_a_right_kernel_passes(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    assert finding(monkeypatch, lambda call: None, step) == ""


@pytest.mark.parametrize("name", ROLES)
@pytest.mark.parametrize("place", [0, -1])
def test_writes_outside_any_tensor_are_noticed(monkeypatch: pytest.MonkeyPatch, name: str, place: int) -> None:
    index = list(ROLES).index(name)

    def stray(call: Call) -> None:
        tensor = call.tensors[index]
        assert tensor is not None
        tensor.storage[place] = 0

    assert finding(monkeypatch, stray) == f"{name}: 1 bytes outside the tensor were written"


@pytest.mark.parametrize("dtype", [torch.bool, torch.int32, torch.float8_e4m3fn, torch.bfloat16, torch.float64])
def test_a_tensor_of_any_dtype_is_no_stray_write(dtype: torch.dtype) -> None:
    tensor = GuardedTensor.poisoned((3, 2), (4, 1), 10, dtype, torch.device("cpu"))
    tensor.view.fill_(1)
    assert tensor.stray_writes() == 0
    tensor.storage[GUARD_BYTES + 3 * dtype.itemsize] = 0
    assert tensor.stray_writes() == 1


def test_gaps_of_an_input_are_guarded(monkeypatch: pytest.MonkeyPatch) -> None:
    def stray(call: Call) -> None:
        tensor = call.tensors[1]
        assert tensor is not None
        tensor.storage[512 + 4] = 0

    assert finding(monkeypatch, stray, step=3) == "kept: 1 bytes outside the tensor were written"


def test_a_changed_input_and_a_wrong_result_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def spoil(call: Call) -> None:
        kept, out = call.views[1], call.views[3]
        assert kept is not None
        assert out is not None
        kept[0], out[2] = 7, 9

    text = finding(monkeypatch, spoil)
    assert "kept was changed, it is an input" in text
    assert "out: 1 of 4 elements differ from the reference, at (2,): 9.0 for " in text

"""The process-wide settings of the operators, and arguments that are refused before a device is asked for."""

from __future__ import annotations

import pytest
import torch

from tkbuild import ops
from tkbuild.errors import ArgumentError
from tkbuild.ops import v1
from tkbuild.ops.engram import gate
from tkbuild.ops.moe.gates import flat
from tkbuild.runtime import api
from tkbuild.runtime.op import KernelOp

E4M3 = torch.float8_e4m3fn
ROWS = torch.zeros(4, 64, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("fmt", "value"),
    [
        ("e4m3", 1e-36),
        ("e4m3", 1e-300),
        ("e4m3", 1e39),
        ("e2m1", 6e-38),
        ("e2m1", 0.0),
        ("e4m3", float("nan")),
        ("e4m3", float("inf")),
    ],
)
def test_clamps_whose_scales_leave_float32_are_refused(fmt: str, value: float) -> None:
    before = ops.get_amax_clamp_for_quant(fmt, False)
    with pytest.raises(ArgumentError, match="expected a number from"):
        ops.set_amax_clamp_for_quant(fmt, False, value)
    assert ops.get_amax_clamp_for_quant(fmt, False) == before


@pytest.mark.parametrize("key", [("e4m3", False), ("e4m3", True), ("e2m1", False), ("e2m1", True)])
def test_default_clamps_may_be_set(key: tuple[str, bool]) -> None:
    ops.set_amax_clamp_for_quant(*key, ops.get_amax_clamp_for_quant(*key))


@pytest.mark.parametrize("value", ["no", None, 2])
def test_a_setting_that_is_neither_on_nor_off(value: object) -> None:
    with pytest.raises(ArgumentError, match="expected True or False"):
        ops.set_pdl(value)


@pytest.mark.parametrize("value", [0, -1, 1.5, 2**31, 2**40])
def test_alignments_that_are_no_number_of_rows_are_refused(value: int) -> None:
    with pytest.raises(ArgumentError, match="from 1 to 2147483647"):
        ops.set_token_alignment(value)
    assert ops.get_token_alignment() == 128


@pytest.mark.parametrize(
    "call",
    [
        lambda: ops.quant.cast_back((torch.zeros(4, 64).to(E4M3), torch.ones(4, 1)), "bf16", (1, 64, 1)),
        lambda: v1.quant.per_channel_cast_fused(torch.tensor(1.0), "e4m3", 128),
        lambda: ops.moe.get_fused_mapping(torch.zeros(4, 8, dtype=torch.int64), 1024, 0, 2**22),
        lambda: ops.moe.moe_topk_gate_backward(
            *(torch.zeros(4, 8), torch.zeros(4, 2, dtype=torch.int64), torch.zeros(4, 2), torch.zeros(4, 2), 1.0),
            mask=torch.ones(4, dtype=torch.bool),
            grad_scores_sum=torch.tensor(0.0),
        ),
        lambda: ops.moe.expand_to_fused_with_sf(ROWS, 128, torch.zeros(4, 2, dtype=torch.int32), torch.zeros(8, dtype=torch.int32)),
        lambda: ops.moe.reduce_fused((ROWS, ROWS, ROWS), None, torch.zeros(2, 2, dtype=torch.int32)),
        lambda: ops.moe.reduce_fused(3, None, torch.zeros(2, 2, dtype=torch.int32)),
        lambda: ops.mhc.mhc_pre_big_fuse_fwd(*[torch.tensor(0.0)] * 8, 1e-6, 1e-6, 1e-6, 1.0, 10),
        lambda: ops.quant.per_token_cast_with_precomputed_sf(ROWS, "e4m3", 32, None),
    ],
)
def test_arguments_of_the_wrong_rank_or_size_are_typed_errors(call) -> None:
    with pytest.raises(ArgumentError):
        call()


@pytest.mark.parametrize("shape", [(4,), (4, 64)])
def test_the_gate_of_1_0_leaves_shapes_to_the_launcher(shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.zeros(shape, dtype=torch.bfloat16)
    for name in ("_gate_fwd", "_gate_bwd"):
        monkeypatch.setattr(gate, name, lambda tensors, static, scalars, outs: (scalars, outs))
    v1.engram.engram_gate_fwd(x, x, x, x, 1e-6, 1e-6)
    (_, num_partials), _ = v1.engram.engram_gate_bwd(x, x, x, x, x, x, x, x, x, 1e-6)
    assert num_partials == 1


def test_flags_may_have_any_layout() -> None:
    flags = torch.tensor([[True, False], [False, True], [True, True]]).T
    assert flat(flags).tolist() == [True, False, True, False, True, True]


@pytest.mark.parametrize("out", [torch.empty(2, 4, dtype=torch.bfloat16), torch.empty(3, 2, 4)])
def test_traced_calls_do_not_convert_into_an_output_buffer(out: torch.Tensor) -> None:
    op = KernelOp("quant.k")
    op.dispatched = lambda x: x + 1
    right = torch.empty(2, 4)
    assert op._dispatch((torch.zeros(2, 4),), (), (right,)) is right
    assert right.tolist() == [[1.0] * 4] * 2
    with pytest.raises(ArgumentError, match="an output buffer is"):
        op._dispatch((torch.zeros(2, 4),), (), (out,))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's own modules, when they are first imported
def test_the_sm_count_is_a_constant_of_a_compiled_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    class Native:
        def num_sms(self, device: int) -> int:
            return 100 + device

    monkeypatch.setattr(api, "native", Native)
    traced = torch.compile(lambda x: x + api.get_num_sms(3), fullgraph=True, backend="eager")
    assert traced(torch.zeros(2)).tolist() == [103.0, 103.0]

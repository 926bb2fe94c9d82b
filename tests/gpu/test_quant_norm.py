"""RMSNorm on a GPU: against the references, on the layouts, outputs and refusals that the contract names."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gpu_checks import opcheck, same, same_with_programmatic_launches

from tkbuild import ops, reference
from tkbuild.errors import ArgumentError, NoVariantError
from tkbuild.runtime.launcher import native

pytestmark = pytest.mark.gpu

E4M3 = torch.float8_e4m3fn
BF16, F32 = torch.bfloat16, torch.float32
FLAGS = [(False, False, False), (True, False, False), (False, True, False), (True, True, True), (False, True, True)]


def random(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.randn(shape, device="cuda").to(dtype)


def sliced(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    """A tensor of ``shape`` whose rows and batches lie apart."""
    return random(*(extent + 16 for extent in shape), dtype=dtype)[tuple(slice(extent) for extent in shape)]


def forward_reference(x: torch.Tensor, weight: torch.Tensor | None, residual: Any = None, **changed: Any) -> Any:
    """(norm_input, rstd, y), shaped like ``x``."""
    rows, more = (t if t is None or t.dim() == 3 else t[None] for t in (x, residual))
    given = {"eps": 1e-6, "out_scale": 1.0, **changed}
    wanted = more if more is None else torch.empty_like(more)
    *z, rstd, y = reference.quant.norm_forward(rows, weight, more, wanted, torch.empty(1, device="cuda"), **given)
    return (z[0] if z else rows).view(x.shape), rstd.view(x.shape[:-1]), y.view(x.shape)


@pytest.mark.parametrize("dtype", [BF16, F32])
@pytest.mark.parametrize("shape", [(33, 7168), (2, 17, 576), (3, 5, 16), (1, 1, 8192), (700, 2048), (2, 0, 64), (0, 3, 64)])
def test_norm_forward(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x, residual, weight = sliced(*shape, dtype=dtype), sliced(*shape, dtype=dtype), random(shape[-1], dtype=dtype)
    out, rstd, norm_input = ops.quant.norm_forward(x, weight, 1e-6, residual, 0.3, with_rstd=True)
    wanted = forward_reference(x, weight, residual, out_scale=0.3)
    for got, want in zip((norm_input, rstd, out), wanted, strict=True):
        assert same(got, want)
    out, rstd, norm_input = ops.quant.norm_forward(x, None, 1e-6)
    assert same(out, forward_reference(x, None)[2])
    assert rstd is None
    assert norm_input is x


@pytest.mark.parametrize("dtype", [BF16, F32])
@pytest.mark.parametrize("shape", [(33, 7168), (2, 17, 576), (2, 2342, 7168), (1, 1, 128)])
@pytest.mark.parametrize(("col_major", "round_sf", "packed"), FLAGS)
def test_the_cast_is_per_token_cast_of_norm_forward(
    dtype: torch.dtype, shape: tuple[int, ...], col_major: bool, round_sf: bool, packed: bool
) -> None:
    x, residual, weight = sliced(*shape, dtype=dtype), sliced(*shape, dtype=dtype), random(shape[-1], dtype=dtype)
    flags = {"use_tma_aligned_col_major_sf": col_major, "round_sf": round_sf, "use_packed_ue8m0": packed}
    y, _, z = ops.quant.norm_forward(x, weight, 1e-6, residual)
    (data, sf), out_bf16, rstd, norm_input = ops.quant.norm_forward_and_per_token_cast(
        x, weight, 1e-6, "e4m3", 32, residual, with_out_bf16=True, with_rstd=True, **flags
    )
    assert same(norm_input, z)
    assert same(out_bf16, y.bfloat16())
    assert same(rstd, forward_reference(x, weight, residual)[1])
    for index in range(shape[0] if len(shape) == 3 else 1):
        rows = (y, data, sf) if len(shape) == 2 else (y[index], data[index], sf[index])
        wanted, wanted_sf = ops.quant.per_token_cast(rows[0], "e4m3", 32, **flags)
        assert same(rows[1], wanted)
        assert same(rows[2], wanted_sf)
        assert rows[2].stride() == wanted_sf.stride()


def test_given_buffers() -> None:
    x, residual, weight = random(9, 512), random(9, 512), random(512)
    data, out_bf16, z = (torch.empty(9, 1024, dtype=dtype, device="cuda")[:, :512] for dtype in (E4M3, BF16, BF16))
    sf = torch.empty(9, 20, device="cuda")[:, :16]
    result = ops.quant.norm_forward_and_per_token_cast(
        x, weight, 1e-6, "e4m3", 32, residual, with_out_bf16=True, out=(data, sf), out_bf16=out_bf16, residual_out=z
    )
    assert result[0][0] is data
    assert result[0][1] is sf
    assert result[1] is out_bf16
    assert result[3] is z
    wanted = ops.quant.norm_forward_and_per_token_cast(x, weight, 1e-6, "e4m3", 32, residual, with_out_bf16=True)
    assert same(data, wanted[0][0])
    assert same(sf, wanted[0][1])
    assert same(out_bf16, wanted[1])
    assert same(z, wanted[3])


def test_in_place() -> None:
    x, residual, weight = random(1000, 2048), random(1000, 2048), random(2048)
    y, _, z = ops.quant.norm_forward(x, weight, 1e-6, residual)
    ours = x.clone()
    assert ops.quant.norm_forward(x, weight, 1e-6, residual.clone(), residual_out=ours, out=torch.empty_like(x))[2] is ours
    ops.quant.norm_forward(x, weight, 1e-6, residual, residual_out=residual)
    assert same(ours, z)
    assert same(residual, z)
    ops.quant.norm_forward(z, weight, 1e-6, out=z)
    assert same(z, y)


@pytest.mark.parametrize(("tokens", "block", "packed"), [(300, 192, True), (1, 192, True), (1000, 128, False), (5, 3, True)])
def test_second_copy_of_the_scales(tokens: int, block: int, packed: bool) -> None:
    x, weight = random(tokens, 7168), random(7168)
    rows = -(-tokens // block) * (-(-block // 128) * 128)
    whole = torch.full((56, rows + 4), -1, dtype=torch.int32, device="cuda").T
    flags = {"round_sf": True, "use_packed_ue8m0": packed, "mega_moe_sf": whole[:tokens], "mega_moe_block_m": block}
    (_, sf), *_ = ops.quant.norm_forward_and_per_token_cast(x, weight, 1e-6, "e4m3", 32, **flags)
    y, _, _ = ops.quant.norm_forward(x, weight, 1e-6)
    words = ops.quant.per_token_cast(y, "e4m3", 32, round_sf=True, use_packed_ue8m0=True)[1]
    assert sf.dtype == (torch.int32 if packed else F32)
    token = torch.arange(tokens, device="cuda")
    i = token % block
    place = token // block * (-(-block // 128) * 128) + i // 128 * 128 + i % 32 * 4 + i % 128 // 32
    assert same(whole[place], words)
    assert int((whole != -1).all(dim=1).sum()) == tokens


def test_nan_and_infinity_concern_their_row_only() -> None:
    x, weight = random(64, 7168), random(7168)
    bad = x.clone()
    bad[3, 5], bad[7, 9] = float("nan"), float("inf")
    got, wanted = (ops.quant.norm_forward_and_per_token_cast(t, weight, 1e-6, "e4m3", 32)[0] for t in (bad, x))
    for ours, theirs in zip(got, wanted, strict=True):
        differs = (ours.view(torch.uint8) != theirs.view(torch.uint8)).any(dim=1)
        assert differs.nonzero().flatten().tolist() == [3, 7]
    assert (got[0][3].view(torch.uint8) == 0x7F).all()


def test_the_number_of_sms_changes_nothing_forward() -> None:
    x, weight = random(1777, 7168), random(7168)

    def cast() -> Any:
        return ops.quant.norm_forward_and_per_token_cast(x, weight, 1e-6, "e4m3", 32, use_tma_aligned_col_major_sf=True)[0]

    wanted = cast()
    try:
        ops.set_num_sms(1)
        got = cast()
    finally:
        ops.set_num_sms(0)
    assert same(got[0], wanted[0])
    assert same(got[1], wanted[1])


def backward_reference(out_grad: torch.Tensor, x: torch.Tensor, weight: Any, rstd: torch.Tensor, **changed: Any) -> Any:
    """x_grad, or (weight_grad, x_grad) with a weight."""
    given = {"grad_dtype": "float32", "num_partials": 1, "out_scale": 1.0, "accumulate": 0, **changed}
    residual, old = given.pop("residual_out_grad", None), given.pop("weight_grad", weight)
    return reference.quant.norm_backward(out_grad, x, rstd, weight, residual, old, rstd, **given)


@pytest.mark.parametrize("dtype", [BF16, F32])
@pytest.mark.parametrize("shape", [(1, 32), (301, 576), (777, 2048), (33, 5120), (1001, 7168), (64, 8192)])
@pytest.mark.parametrize("with_residual", [False, True])
def test_norm_backward(dtype: torch.dtype, shape: tuple[int, int], with_residual: bool) -> None:
    out_grad, x, weight = sliced(*shape, dtype=dtype), sliced(*shape, dtype=dtype), random(shape[1], dtype=dtype)
    residual = sliced(*shape, dtype=dtype) if with_residual else None
    rstd = forward_reference(x, weight)[1]
    x_grad, grad = ops.quant.norm_backward(out_grad, x, weight, rstd, residual, 0.3)
    name = str(dtype).removeprefix("torch.")
    wanted, wanted_x = backward_reference(out_grad, x, weight, rstd, residual_out_grad=residual, out_scale=0.3, grad_dtype=name)
    assert same(x_grad, wanted_x)
    assert x_grad.is_contiguous()
    torch.testing.assert_close(grad, wanted, rtol=8e-3 if dtype == BF16 else 1e-5, atol=1e-4)
    again = ops.quant.norm_backward(out_grad, x, weight, rstd, residual, 0.3)[1]
    assert same(grad, again)


@pytest.mark.parametrize("grad_dtype", [BF16, F32])
def test_weight_grad_accumulates(grad_dtype: torch.dtype) -> None:
    out_grad, x, weight, old = random(500, 3072), random(500, 3072), random(3072), random(3072, dtype=grad_dtype)
    rstd = forward_reference(x, weight)[1]
    given = old.clone()
    _, grad = ops.quant.norm_backward(out_grad, x, weight, rstd, weight_grad=given)
    assert grad is given
    name = str(grad_dtype).removeprefix("torch.")
    wanted, _ = backward_reference(out_grad, x, weight, rstd, weight_grad=old, grad_dtype=name, accumulate=1)
    torch.testing.assert_close(grad, wanted, rtol=8e-3 if grad_dtype == BF16 else 1e-5, atol=1e-4)


def test_backward_without_weight_and_with_one_sm() -> None:
    out_grad, x = random(500, 3072), random(500, 3072)
    rstd = forward_reference(x, None)[1]
    x_grad, grad = ops.quant.norm_backward(out_grad, x, None, rstd)
    assert grad is None
    assert same(x_grad, backward_reference(out_grad, x, None, rstd)[0])
    try:
        ops.set_num_sms(1)
        assert same(ops.quant.norm_backward(out_grad, x, None, rstd)[0], x_grad)
    finally:
        ops.set_num_sms(0)


def test_programmatic_launch_gives_the_same_results() -> None:
    out_grad, x, weight = random(4096, 2048), random(4096, 2048), random(2048)

    def chain() -> list[torch.Tensor]:
        y, rstd, z = ops.quant.norm_forward(x, weight, 1e-6, x, with_rstd=True)
        return [y, *ops.quant.norm_backward(y, z, weight, rstd, out_grad)]

    assert same_with_programmatic_launches(chain)


def test_no_rows() -> None:
    empty, weight, old = random(0, 512), random(512), random(512)
    before = native().launch_count()
    (data, sf), *_ = ops.quant.norm_forward_and_per_token_cast(empty, weight, 1e-6, "e4m3", 32, with_rstd=True)
    assert (data.shape, sf.shape) == ((0, 512), (0, 16))
    x_grad, grad = ops.quant.norm_backward(empty, empty, weight, torch.empty(0, device="cuda"))
    assert x_grad.shape == (0, 512)
    assert same(grad, torch.zeros_like(weight))
    given = old.clone()
    ops.quant.norm_backward(empty, empty, weight, torch.empty(0, device="cuda"), weight_grad=given)
    assert same(given, old)
    assert native().launch_count() == before


X, W = (64, 512), (512,)


@pytest.mark.parametrize(
    "call",
    [
        lambda q, x, w: q.norm_forward(x[:, :40], w[:40], 1e-6),
        lambda q, x, w: q.norm_forward(random(4, 8208), None, 1e-6),
        lambda q, x, w: q.norm_forward(x[:, 4:500], None, 1e-6),
        lambda q, x, w: q.norm_forward(random(4, 520)[:, :512], w, 1e-6),
        lambda q, x, w: q.norm_forward(x, w.float(), 1e-6),
        lambda q, x, w: q.norm_forward(x, w[:256], 1e-6),
        lambda q, x, w: q.norm_forward(x.half(), None, 1e-6),
        lambda q, x, w: q.norm_forward(x.cpu(), None, 1e-6),
        lambda q, x, w: q.norm_forward(x[0], None, 1e-6),
        lambda q, x, w: q.norm_forward(x, w, 1e-6, residual_out=x),
        lambda q, x, w: q.norm_forward(x, w, 1e-6, x[:32]),
        lambda q, x, w: q.norm_forward_and_per_token_cast(x, w, 1e-6, "e4m3", 64),
        lambda q, x, w: q.norm_forward_and_per_token_cast(x, w, 1e-6, "e2m1", 32),
        lambda q, x, w: q.norm_forward_and_per_token_cast(x[:, :48], None, 1e-6, "e4m3", 32),
        lambda q, x, w: q.norm_forward_and_per_token_cast(x, w, 1e-6, "e4m3", 32, use_packed_ue8m0=True),
        lambda q, x, w: q.norm_forward_and_per_token_cast(x, w, 1e-6, "e4m3", 32, out_bf16=x.clone()),
        lambda q, x, w: q.norm_forward_and_per_token_cast(x, w, 1e-6, "e4m3", 32, mega_moe_block_m=128),
        lambda q, x, w: with_second_copy(q, x, w, 64, round_sf=False),
        lambda q, x, w: with_second_copy(q, x, w, 63),
        lambda q, x, w: q.norm_backward(x, x, None, random(64, dtype=F32), weight_grad=w),
        lambda q, x, w: q.norm_backward(x, x, w, random(64)),
        lambda q, x, w: q.norm_backward(x, x, w, random(64, dtype=F32), weight_grad=w.half()),
        lambda q, x, w: q.norm_backward(x[None], x[None], w, random(64, dtype=F32)),
        lambda q, x, w: q.norm_backward(x.cpu(), x.cpu(), None, torch.ones(64)),
    ],
)
def test_refusals_launch_nothing(call: Any) -> None:
    x, w = random(*X), random(*W)
    before = native().launch_count()
    with pytest.raises((ArgumentError, NoVariantError)):
        call(ops.quant, x, w)
    assert native().launch_count() == before


def with_second_copy(quant: Any, x: torch.Tensor, w: torch.Tensor, pitch: int, round_sf: bool = True) -> Any:
    second = torch.zeros(4, pitch, dtype=torch.int32, device="cuda").T
    flags = {"round_sf": round_sf, "mega_moe_sf": second[: x.shape[0]], "mega_moe_block_m": 64}
    return quant.norm_forward_and_per_token_cast(x, w, 1e-6, "e4m3", 32, **flags)


def test_a_second_copy_behind_the_end_of_its_storage_is_refused() -> None:
    x, w = random(*X), random(*W)
    with pytest.raises(ArgumentError, match="storage for 128 rows"):
        ops.quant.norm_forward_and_per_token_cast(
            *(x, w, 1e-6, "e4m3", 32),
            round_sf=True,
            mega_moe_sf=torch.zeros(3 * 128 + 64, dtype=torch.int32, device="cuda").as_strided((64, 4), (1, 128)),
            mega_moe_block_m=64,
        )


def test_opcheck() -> None:
    x, w, rstd = random(2, 5, 512), random(512), random(2, 5, dtype=F32)
    forward, cast, backward = (
        getattr(torch.ops.tkbuild, f"norm_{name}") for name in ("forward", "forward_and_per_token_cast", "backward")
    )
    opcheck(forward, (x, w, x.clone(), x.clone(), rstd), {"eps": 1e-6})
    opcheck(
        cast,
        (x, w, None, None, x.clone(), rstd, None),
        {"sf_format": "ue8m0", "col_major": True, "eps": 1e-6, "round_sf": 1},
    )
    partial = torch.zeros(ops.get_num_sms(), 512, device="cuda")
    opcheck(
        backward,
        (x[0], x[1], rstd[0].clone(), w, None, w.clone(), partial),
        {"grad_dtype": BF16, "num_partials": ops.get_num_sms()},
    )

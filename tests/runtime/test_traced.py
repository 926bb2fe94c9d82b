"""What fake implementations refuse: what the launcher would, as far as dtypes, devices, values and known sizes say."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from runtime.providers import cast_signature, expr, write_provider

from tkbuild.errors import ArgumentError, NoVariantError
from tkbuild.runtime import op, registry, torch_ops
from tkbuild.signature import ArgSpec, CheckSpec, DimSpec, DtypeRule, KernelSignature

META, CPU = torch.device("meta"), torch.device("cpu")


def wide_signature() -> KernelSignature:
    """The cast with a weight of a dtype and device of its own, checks of values and strides, and a largest row."""
    one = cast_signature()
    x, *outs = one.args
    checks = (*one.checks, CheckSpec(expr("ld % 8 == 0"), "ld % 8 == 0", ""), CheckSpec(expr("round_sf <= 1"), "round_sf <= 1", ""))
    weight = ArgSpec("w", "in", DtypeRule("float32"), (expr("W"),), optional=True)
    return replace(one, args=(x, weight, *outs), checks=checks, dims=(DimSpec("T", max=1000),))


@pytest.fixture(autouse=True)
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv(registry.KERNELS_VARIABLE, str(write_provider(tmp_path / "kernels", wide_signature())))
    monkeypatch.setattr(registry, "_installed_roots", list)
    registry.registry.cache_clear()
    yield
    registry.registry.cache_clear()


def fake(x: torch.Tensor, w: torch.Tensor | None = None, block: Any = 32, round_sf: Any = 0) -> Any:
    return torch_ops._fake_implementation(wide_signature())(x, w, block=block, round_sf=round_sf)


def rows(*shape: int, dtype: torch.dtype = torch.bfloat16, device: torch.device = META) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device=device)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: fake(rows(4, 60)), r"requires H % 64 == 0, got H = 60: hidden must be a multiple of 64"),
        (lambda: fake(rows(4, 64), round_sf=7), r"requires round_sf <= 1, got round_sf = 7"),
        (lambda: fake(rows(1001, 64)), r"T is 1001, expected a value from -2147483648 to 1000"),
        (lambda: fake(rows(4, 64), round_sf=2**40), r"round_sf is 1099511627776, expected a value from"),
        (lambda: fake(rows(4, 64), rows(3)), r"w: dtype bfloat16, expected float32"),
        (lambda: fake(rows(4, 64), rows(3, dtype=torch.float32, device=CPU)), r"w is on cpu, expected a CUDA device"),
        (lambda: fake(rows(4, 64, device=CPU)), r"x is on cpu, expected a CUDA device; tkbuild\.reference"),
        (lambda: fake(rows(4, 64), block="32"), r"block is '32', expected a whole number"),
        (lambda: fake(rows(4, 64), block=None), r"block is None, expected a whole number"),
        (lambda: fake(rows(4, 64), round_sf=0.5), r"round_sf is 0\.5, expected a whole number"),
    ],
)
def test_refused_while_traced(call: Callable[[], Any], text: str) -> None:
    with pytest.raises(ArgumentError, match=text):
        call()


def test_what_no_variant_covers() -> None:
    with pytest.raises(NoVariantError, match="block is 64, built for 32"):
        fake(rows(4, 64), block=64)
    with pytest.raises(NoVariantError, match=r"cap is 1024, it must be at least H = 2048"):
        fake(rows(4, 2048))


def test_strides_decide_nothing() -> None:
    """The stride of a single row means nothing, and compiled code may lay tensors out otherwise."""
    assert fake(rows(1, 67)[:, :64])[0].shape == (1, 64)


def test_open_sizes_stay_open() -> None:
    graphs = []

    def count(module: torch.fx.GraphModule, _inputs: Any) -> Any:
        graphs.append(module)
        return module.forward

    with torch.library._scoped_library("tkbuild_test", "FRAGMENT") as library:
        library.define("cast(Tensor x) -> (Tensor, Tensor)")
        torch.library.register_fake("tkbuild_test::cast", lambda x: fake(x), lib=library)
        compiled = torch.compile(lambda x: torch.ops.tkbuild_test.cast(x), backend=count, fullgraph=True, dynamic=True)
        for shape in ((32, 64), (128, 64), (65, 192)):
            compiled(rows(*shape))
        assert len(graphs) == 1


def test_a_value_that_torch_refuses_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    one = op.KernelOp("quant.cast")
    one.keywords = ("block", "col_major", "round_sf")

    def refuse(*_args: Any, **_keywords: Any) -> None:
        raise RuntimeError("torch's own words")

    one.dispatched = refuse
    with pytest.raises(ArgumentError, match=r"block is 8\.5, expected a whole number"):
        one((rows(4, 64).as_subclass(torch.nn.Buffer), None), (8.5, False), (0,))
    with pytest.raises(RuntimeError, match="torch's own words"):
        one((rows(4, 64).as_subclass(torch.nn.Buffer), None), (32, False), (0,))

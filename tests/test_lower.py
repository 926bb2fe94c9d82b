"""Lowering: golden launch facts of each kind of host function, refusals, and independence from order and devices."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("tilelang")

from tkbuild.errors import LowerError
from tkbuild.lower import headers_first, lower

pytestmark = pytest.mark.toolchain

GOLDEN = Path(__file__).parent / "golden"
HEAD = "import tilelang.language as T\n"
PLAIN = """
M = T.dynamic("M")
@T.prim_func
def kernel(x: T.Tensor((M,), "float32"), out: T.Tensor((M,), "float32")):
    with T.Kernel(T.ceildiv(M, 128), threads=128) as bx:
        for i in T.Parallel(128):
            if bx * 128 + i < M:
                out[bx * 128 + i] = x[bx * 128 + i] + 1
"""
STRIDED_SCALAR_GRID = """
M, N, ld = T.dynamic("M"), T.dynamic("N"), T.dynamic("ld", "int64")
@T.prim_func
def kernel(x: T.StridedTensor((M, N), (ld, 1), "float32"), out: T.Tensor((M, N), "float32"), scale: T.float32, num_sms: T.int32):
    with T.Kernel(num_sms, threads=128) as bx:
        T.assume(ld % 4 == 0)
        for row in T.serial(T.ceildiv(M - bx, num_sms)):
            for i in T.Parallel(128):
                if i < N:
                    out[bx + row * num_sms, i] = x[bx + row * num_sms, i] * scale
"""
TMA = """
M, N, K, ld = T.dynamic("M"), T.dynamic("N"), T.dynamic("K"), T.dynamic("ld")
@T.prim_func
def kernel(a: T.StridedTensor((M, K), (ld, 1), "bfloat16"), b: T.Tensor((N, K), "bfloat16"), c: T.Tensor((M, N), "bfloat16")):
    with T.Kernel(T.ceildiv(N, 128), T.ceildiv(M, 128), threads=128) as (bx, by):
        A = T.alloc_shared((128, 64), "bfloat16")
        B = T.alloc_shared((128, 64), "bfloat16")
        C = T.alloc_fragment((128, 128), "float32")
        T.clear(C)
        for k in T.Pipelined(T.ceildiv(K, 64), num_stages=3):
            T.copy(a[by * 128, k * 64], A)
            T.copy(b[bx * 128, k * 64], B)
            T.gemm(A, B, C, transpose_B=True)
        T.copy(C, c[by * 128, bx * 128])
"""
TWO_LAUNCHES = """
M = T.dynamic("M")
@T.prim_func
def kernel(x: T.Tensor((M,), "float32"), out: T.Tensor((M,), "float32")):
    with T.Kernel(T.ceildiv(M, 128), threads=128) as bx:
        T.pdl_sync()
        for i in T.Parallel(128):
            if bx * 128 + i < M:
                out[bx * 128 + i] = x[bx * 128 + i] + 1
        T.pdl_trigger()
    with T.Kernel(T.ceildiv(M, 256), threads=256) as bx:
        for i in T.Parallel(256):
            if bx * 256 + i < M:
                out[bx * 256 + i] = out[bx * 256 + i] * 2
"""
COOPERATIVE = """
M = T.dynamic("M")
@T.prim_func
def kernel(x: T.Tensor((M,), "float32"), out: T.Tensor((M,), "float32"), num_sms: T.int32):
    with T.Kernel(num_sms, threads=128) as bx:
        out[bx] = x[bx]
        T.sync_grid()
        out[bx + 1] = out[bx]
"""
CLUSTER = PLAIN.replace("threads=128)", "threads=128, cluster_dims=(2, 1, 1))")
SOURCES = {
    "plain": PLAIN,
    "cluster": CLUSTER,
    "strided_scalar_grid": STRIDED_SCALAR_GRID,
    "tma": TMA,
    "two_launches": TWO_LAUNCHES,
    "cooperative": COOPERATIVE,
}


def lowered(source: str, arch: str = "sm_90a"):
    return lower(HEAD + source, arch=arch, pass_configs={})


@pytest.mark.parametrize("name", SOURCES)
def test_launch_facts_are_the_golden_ones(name: str) -> None:
    facts = lowered(SOURCES[name]).launch_facts
    assert facts == json.loads((GOLDEN / f"launch_facts_{name}.json").read_text())


def test_golden_kinds_are_what_their_names_say() -> None:
    facts = {name: json.loads((GOLDEN / f"launch_facts_{name}.json").read_text()) for name in SOURCES}
    assert facts["strided_scalar_grid"]["launches"][0]["grid"] == ["num_sms", 1, 1]
    assert {"value": "ld", "dtype": "int64"} in facts["strided_scalar_grid"]["launches"][0]["params"]
    assert [t["arg"] for t in facts["tma"]["tensor_maps"]] == ["a", "b"]
    assert facts["tma"]["tensor_maps"][0]["strides"] == [["*", "ld", 2]]
    assert [facts[name]["launches"][0]["cluster"] for name in ("plain", "cluster")] == [[1, 1, 1], [2, 1, 1]]
    assert [launch["programmatic"] for launch in facts["two_launches"]["launches"]] == [True, False]
    assert [launch["cooperative"] for launch in facts["cooperative"]["launches"]] == [True]


def test_result_does_not_depend_on_what_was_lowered_before() -> None:
    alone = lowered(PLAIN)
    lowered(TMA)
    lowered(TWO_LAUNCHES)
    assert lowered(PLAIN) == alone


@pytest.mark.parametrize(
    "query", ["get_device_properties(0)", "is_available()", "get_device_capability()", "device_count()", "get_arch_list()"]
)
def test_device_query_in_a_template_is_refused(query: str) -> None:
    source = f"import torch\nfact = torch.cuda.{query}\n" + PLAIN
    with pytest.raises(LowerError, match="asks for a property of a CUDA device"):
        lowered(source)


def test_error_in_the_source_names_its_line() -> None:
    with pytest.raises(LowerError, match=r"line 3: NameError.*undefined_name"):
        lowered("\nundefined_name\n")


def test_source_without_kernel_is_refused() -> None:
    with pytest.raises(LowerError, match="must define `kernel`"):
        lowered("kernel = 7\n")


def test_kernel_without_launch_is_refused() -> None:
    with pytest.raises(LowerError):
        lowered('@T.prim_func\ndef kernel(x: T.Tensor((4,), "float32")):\n    x[0] = 1.0\n')


@pytest.mark.parametrize("head", ["if M > 4:", "for _ in T.serial(3):"])
def test_a_launch_under_a_condition_or_in_a_loop_is_refused(head: str) -> None:
    before, launch = PLAIN.split("    with T.Kernel", 1)
    inner = "        with T.Kernel" + launch.replace("\n    ", "\n        ")
    with pytest.raises(LowerError, match="stands under an `if` or in a loop"):
        lowered(f"{before}    {head}\n{inner}")


_HEADERS = "#if defined(X)\n#include <cuda.h>\n#endif\n#include <a.h>\n#ifdef B\n#include <b.h>\n#endif\n"


@pytest.mark.parametrize(
    "prelude",
    [
        "namespace a {\nint b;\n}\n",
        "int f() {\n#pragma unroll\n  for (;;) {}\n}\n#if __CUDA_ARCH__ >= 1000\nint c;\n#endif\n",
        "int f() {\n#if __CUDA_ARCH__ >= 1000\n  return 1;\n#else\n  return 2;\n#endif\n}\n",
    ],
)
def test_headers_come_before_the_prelude(prelude: str) -> None:
    kernel = 'extern "C" __global__ void k() {}\n'
    assert headers_first(prelude + _HEADERS + kernel) == _HEADERS + prelude + kernel
    assert headers_first(_HEADERS + prelude + kernel) == _HEADERS + prelude + kernel


@pytest.mark.parametrize("prelude", ["#define NDEBUG\nint a;\n", "#include <mine.h>\nint a;\n", "int a;\n#pragma once\nint b;\n"])
def test_a_prelude_for_the_preprocessor_stays_first(prelude: str) -> None:
    source = prelude + _HEADERS + "void k() {}\n"
    assert headers_first(source) == source


def test_source_without_headers_stays_as_it_is() -> None:
    assert headers_first("int a;\n#if 1\nint b;\n#endif\n") == "int a;\n#if 1\nint b;\n#endif\n"

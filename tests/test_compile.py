"""Compiling: what counts as a result, resources, and that sharing parsed headers changes nothing."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from fake_toolkit import FakeToolkit, make_cubin

from tkbuild.arch import TargetArch
from tkbuild.compile import Compiler, KernelResources, check_allowed, parse_resources
from tkbuild.elf import parse_cubin
from tkbuild.errors import CompileError, StepTimeoutError, ToolchainError
from tkbuild.flags import compile_flags
from tkbuild.frontend import CannotFork, build_fork_server, nvcc_steps, split_headers, take_out_macros
from tkbuild.toolchain import ProcessGroups, find, find_tilelang
from tkbuild.workfolder import work_folder

SM_90A, SM_100A = TargetArch.parse("sm_90a"), TargetArch.parse("sm_100a")
SOURCE = '#include <common.h>\n\nextern "C" __global__ void kernel_kernel() {}\n'


@pytest.fixture
def kit(tmp_path: Path) -> FakeToolkit:
    return FakeToolkit.create(tmp_path / "cuda")


@pytest.fixture
def compiler(kit: FakeToolkit, tmp_path: Path) -> Iterator[Compiler]:
    (tmp_path / "work").mkdir()
    compiler = Compiler(kit.toolchain(), [tmp_path / "include"], tmp_path / "work")
    yield compiler
    compiler.close()
    assert list((tmp_path / "work").glob("kernel-*")) == []


def test_result_is_checked_and_described(compiler: Compiler) -> None:
    compiled = compiler.compile(SOURCE, SM_90A, compile_flags({}, []), 30, share_headers=False)
    assert parse_cubin(compiled.cubin).arch == "sm_90a"
    assert compiled.resources == {"kernel_kernel": KernelResources(40, 0, 0, 1024)}
    assert compiled.resources_json() == {
        "kernel_kernel": {"registers": 40, "spill_bytes": 0, "stack_bytes": 0, "static_smem_bytes": 1024}
    }
    assert "Used 40 registers" in compiled.log
    assert "Compile time" not in compiled.log


@pytest.mark.parametrize(
    ("mode", "message"),
    [
        ("empty", "not a complete cubin"),
        ("half", "not a complete cubin"),
        ("fail", "failed with status 1:\nptxas fatal: no"),
        ("crash", "was ended by SIGSEGV; `tkbuild doctor` tries the toolkit, and `tkbuild doctor --install-toolchain` mends"),
        ("killed", "was ended by SIGKILL; usually for want of memory"),
        ("other_arch", "a cubin for sm_100a, expected sm_90a"),
        ("nothing", "wrote no cubin"),
        ("ptx", "embeds PTX"),
    ],
)
def test_wrong_results_are_refused_and_the_next_try_is_right(kit: FakeToolkit, compiler: Compiler, mode: str, message: str) -> None:
    (kit.root / "cubins/ptx").write_bytes(make_cubin(extra_section=".nv_debug_ptx_txt"))
    kit.set_mode(mode)
    with pytest.raises(CompileError, match=re.escape(message)):
        compiler.compile(SOURCE, SM_90A, (), 30, share_headers=False)
    kit.set_mode("ok")
    compiler.compile(SOURCE, SM_90A, (), 30, share_headers=False)


@pytest.mark.parametrize("name", ["</tmp/gain.h>", '"gain.h"', "<cuda/../../gain.h>", "GAIN", '"/tmp/gain.h"'])
@pytest.mark.parametrize("space", ["#include ", "  # include ", "#embed "])
def test_includes_that_no_key_covers_are_refused(compiler: Compiler, name: str, space: str) -> None:
    with pytest.raises(CompileError, match="expected a header of the toolkit or of TileLang") as caught:
        compiler.compile(f"#include <cuda_fp8.h>\n{space}{name}\n{SOURCE}", SM_90A, compile_flags({}, []), 30, share_headers=False)
    assert caught.value.facts["include"] == name


def test_error_of_an_early_step_is_shown(kit: FakeToolkit, compiler: Compiler) -> None:
    with pytest.raises(CompileError, match=r"kernel\.cu:1: error: #error"):
        compiler.compile("#error\n" + SOURCE, SM_90A, (), 30, share_headers=True)
    assert kit.calls("ptxas") == 0


def test_front_end_that_cannot_be_forked_is_run_plainly(kit: FakeToolkit, compiler: Compiler) -> None:
    compiler.compile(SOURCE, SM_90A, (), 30, share_headers=True)
    assert compiler.forked == 0
    assert kit.calls("ptxas") == 1


def test_time_out(kit: FakeToolkit, compiler: Compiler) -> None:
    kit.set_mode("hang")
    with pytest.raises(StepTimeoutError, match=r"ptxas was stopped after 0\.5 s"):
        compiler.compile(SOURCE, SM_90A, (), 0.5, share_headers=False)


def test_old_toolkit_is_refused_before_it_runs(tmp_path: Path) -> None:
    kit = FakeToolkit.create(tmp_path / "old", release="12.4.1", header=12040)
    with pytest.raises(ToolchainError, match=r"sm_100a needs CUDA 12\.8"):
        Compiler(kit.toolchain(), [], tmp_path).compile(SOURCE, SM_100A, (), 30, share_headers=False)
    assert kit.calls("g++") == 0


def test_unknown_steps_are_refused() -> None:
    with pytest.raises(ToolchainError, match="does not preprocess, run cicc and ptxas"):
        nvcc_steps('#$ TOP=x\n#$ cicc kernel.cu -o "kernel.ptx"\n')


def test_path_of_the_source_is_taken_out() -> None:
    steps = nvcc_steps(
        '#$ CICC_PATH=/cuda dir\n#$ "/usr/bin"/g++ -E "/tmp/x/kernel.cu" -o "./kernel.cpp1.ii"\n'
        '#$ "$CICC_PATH/cicc" --orig_src_path_name "/tmp/x/kernel.cu" "./kernel.cpp1.ii" -o "./kernel.ptx"\n'
        '#$ ptxas "./kernel.ptx" -o "kernel.cubin"\n'
    )
    assert steps.preprocess == ("/usr/bin/g++", "-E", "kernel.cu", "-o", "kernel.cpp1.ii")
    assert steps.front_end == ("/cuda dir/cicc", "--orig_src_path_name", "kernel.cu", "kernel.cpp1.ii", "-o", "kernel.ptx")


# ---- headers


def test_headers_are_the_leading_directives() -> None:
    headers = "#ifdef A\n#define X \\\n  1\n#include <a.h>\n#endif\n// note\n\n"
    assert split_headers(headers + "int x;\n#pragma unroll\n") == (headers, "int x;\n#pragma unroll\n")


@pytest.mark.parametrize(
    "source",
    [
        "int x;\n",
        "#include <a.h>\n",
        "#ifdef A\n#include <a.h>\nint x;\n#endif\n",
        "#include <a.h>\nint x;\n#include <b.h>\n",
        "#include <a.h>\nint x = __COUNTER__;\n",
        '#include <a.h>\nint x;\n# pragma push_macro("A")\n',
    ],
)
def test_sources_that_cannot_be_split(source: str) -> None:
    with pytest.raises(CannotFork):
        split_headers(source)


def test_macros_leave_every_line_in_its_place() -> None:
    text, macros = take_out_macros(b'# 1 "a"\n#define A 1\nint x;\n#undef A\n int y;\n')
    assert text == b'# 1 "a"\n\nint x;\n\n int y;\n'
    assert macros == b"#define A 1\n#undef A\n"


# ---- resources


LOG = """\
ptxas info    : Compiling entry function 'one' for 'sm_90a'
ptxas info    : Function properties for one
    8 bytes stack frame, 12 bytes spill stores, 16 bytes spill loads
ptxas info    : Used 255 registers, used 1 barriers, 8 bytes cumulative stack size, 1024 bytes smem
ptxas info    : Function properties for helper
    32 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Compiling entry function 'two' for 'sm_90a'
ptxas info    : Function properties for two
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 10 registers, used 0 barriers
"""


def test_resources_of_several_kernels() -> None:
    assert parse_resources(LOG) == {"one": KernelResources(255, 28, 8, 1024), "two": KernelResources(10, 0, 0, 0)}


def test_limits_of_a_spec() -> None:
    resources = {"k": {"registers": 255, "spill_bytes": 28, "stack_bytes": 8, "static_smem_bytes": 0}}
    check_allowed("v", resources, {"spill_bytes": 28, "stack_bytes": 8})
    with pytest.raises(
        CompileError, match="v: k uses 28 spill_bytes, allowed: 0; k uses 8 stack_bytes, allowed: 4; lower the tile"
    ):
        check_allowed("v", resources, {"spill_bytes": 0, "stack_bytes": 4})


# ---- the real compiler


REAL = """\
#include <cuda_bf16.h>
#include <cuda/std/type_traits>
#include <cute/numeric/numeric_types.hpp>

#define SCALE {scale}
extern "C" __global__ void __launch_bounds__(128, 1) kernel_kernel(const __nv_bfloat16* x, float* out, int n) {{
  int i = blockIdx.x * 128 + threadIdx.x;
  if (i < n) out[i] = __bfloat162float(x[i]) * SCALE * (__LINE__ == {line} ? 1 : 2);
}}
"""


def real_source(scale: int) -> str:
    return REAL.format(scale=scale, line=8)


@pytest.mark.toolchain
@pytest.mark.parametrize("arch", [SM_90A, SM_100A])
def test_shared_headers_and_folders_change_no_bit(arch: TargetArch, tmp_path: Path) -> None:
    toolchain, tilelang, flags = find(), find_tilelang(), compile_flags({}, [])
    cubins: dict[bool, list[bytes]] = {}
    for share in (True, False):
        (tmp_path / f"folder-{share}" / "x").mkdir(parents=True)
        with work_folder(tmp_path / f"folder-{share}" / ("x" if share else ".")) as folder:
            compiler = Compiler(toolchain, tilelang.include_dirs, folder)
            try:
                with ThreadPoolExecutor(2) as pool:
                    jobs = [pool.submit(compiler.compile, real_source(i), arch, flags, 120, share_headers=share) for i in (1, 2)]
                    cubins[share] = [job.result().cubin for job in jobs]
                assert compiler.forked == (2 if share else 0)
            finally:
                compiler.close()
    assert cubins[True] == cubins[False]
    assert cubins[True][0] != cubins[True][1]
    facts = parse_cubin(cubins[True][0])
    assert (facts.arch, facts.kernels, facts.has_ptx) == (str(arch), ("kernel_kernel",), False)
    assert str(tmp_path).encode() not in cubins[True][0]


@pytest.mark.toolchain
def test_the_front_end_has_neither_random_addresses_nor_time(tmp_path: Path) -> None:
    """Both had decided on the code of a kernel."""
    library = build_fork_server(tmp_path, find().host_compiler, dict(os.environ), ProcessGroups())
    program = "import time; print(time.time(), time.monotonic(), time.process_time(), open('/proc/self/personality').read())"
    env = {**os.environ, "LD_PRELOAD": str(library)}
    told = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, check=True)
    *times, personality = told.stdout.split()
    assert times == ["0.0"] * 3
    may_fix = subprocess.run(["setarch", "-R", "true"], check=False).returncode == 0 if shutil.which("setarch") else False
    assert bool(int(personality, 16) & 0x40000) or not may_fix
    with work_folder() as folder:
        compiler = Compiler(find(), find_tilelang().include_dirs, folder)
        assert compiler._front_end_env()["LD_PRELOAD"].endswith("forkserver.so")
        compiler.close()


@pytest.mark.toolchain
def test_real_error_names_the_line() -> None:
    with work_folder() as folder:
        compiler = Compiler(find(), find_tilelang().include_dirs, folder)
        try:
            with pytest.raises(CompileError, match=r'kernel\.cu\(4\): error: identifier "wrong" is undefined'):
                compiler.compile(
                    "#include <cuda_bf16.h>\n\n__global__ void k(int* x) {\n  *x = wrong;\n}\n", SM_90A, (), 120, share_headers=True
                )
        finally:
            compiler.close()

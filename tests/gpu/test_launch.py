"""How launches behave in a process: streams, graphs, threads, forks, devices, tracing, settings."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import threading

import pytest
import torch
from gpu_checks import opcheck

import tkbuild.runtime
from tkbuild import ops
from tkbuild.errors import NoVariantError
from tkbuild.runtime.launcher import native
from tkbuild.runtime.registry import registry

pytestmark = pytest.mark.gpu


def cast(x: torch.Tensor) -> torch.Tensor:
    return ops.quant.per_token_cast(x, "e4m3", 128)[0].view(torch.uint8)


def sample(rows: int = 64, hidden: int = 4096) -> torch.Tensor:
    return torch.randn(rows, hidden, device="cuda").bfloat16()


def run(code: str) -> list[str]:
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_follows_the_current_stream() -> None:
    x = torch.zeros(256, 4096, dtype=torch.bfloat16, device="cuda")
    stream = torch.cuda.Stream()
    wanted = cast(torch.full_like(x, 3.0))
    for _ in range(50):
        x.zero_()
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(200_000)
            x.fill_(3.0)
            got = cast(x)
        stream.synchronize()
        assert torch.equal(got, wanted)


def test_graph_replays_on_new_input() -> None:
    tkbuild.runtime.preload("quant.per_token_cast")
    x = sample()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = cast(x)
    fresh = sample()
    x.copy_(fresh)
    graph.replay()
    assert torch.equal(got, cast(fresh))


def test_capture_works_as_the_first_call_after_preload() -> None:
    code = """
        import torch, tkbuild.ops as ops, tkbuild.runtime
        x = torch.randn(32, 2048, device="cuda").bfloat16()
        tkbuild.runtime.preload("quant.*")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            data, sf = ops.quant.per_token_cast(x, "e4m3", 128)
        graph.replay()
        print(torch.equal(data.view(torch.uint8), ops.quant.per_token_cast(x, "e4m3", 128)[0].view(torch.uint8)))
    """
    assert run(code) == ["True"]


def test_threads_with_their_own_streams() -> None:
    failures: list[str] = []

    def work(seed: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            x = torch.randn(64, 2048, device="cuda").bfloat16()
            torch.cuda.current_stream().synchronize()
            first = cast(x)
            for _ in range(100):
                if not torch.equal(cast(x), first):
                    failures.append(f"thread {seed}")

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def test_first_call_in_a_thread_that_never_touched_cuda() -> None:
    code = """
        import threading, torch, tkbuild.ops as ops
        made = []
        maker = threading.Thread(target=lambda: made.append(torch.randn(8, 512, device="cuda").bfloat16()))
        maker.start(); maker.join()
        caller = threading.Thread(target=lambda: print(ops.quant.per_token_cast(made[0], "e4m3", 128)[0].shape[0]))
        caller.start(); caller.join()
    """
    assert run(code) == ["8"]


def test_forked_children_each_use_the_device() -> None:
    code = """
        import os, sys, torch
        import tkbuild.ops as ops, tkbuild.runtime
        tkbuild.runtime.kernels()
        from tkbuild.runtime.launcher import native
        native()
        assert not torch.cuda.is_initialized()
        children = []
        for _ in range(4):
            pid = os.fork()
            if pid == 0:
                x = torch.ones(4, 256, device="cuda").bfloat16()
                ok = ops.quant.per_token_cast(x, "e4m3", 128)[1].shape == (4, 2)
                os._exit(0 if ok else 1)
            children.append(pid)
        print(*[os.waitpid(pid, 0)[1] for pid in children])
    """
    assert run(code) == ["0"] * 4


@pytest.mark.skipif("torch.cuda.device_count() < 2", reason="needs two GPUs")
def test_runs_on_the_device_of_the_tensors() -> None:
    x = torch.randn(16, 1024, device="cuda:1").bfloat16()
    with torch.cuda.device(0):
        got = cast(x)
    assert got.device == x.device
    assert torch.equal(got.cpu(), cast(x.to("cuda:0")).cpu())
    assert torch.cuda.current_device() == 0


def test_calls_of_an_image_write_nothing_and_start_nothing() -> None:
    code = """
        import os, sys, torch
        x = torch.randn(8, 512, device="cuda").bfloat16()
        scores = torch.randn(8, 64, device="cuda")
        events = []
        def hook(event, args):
            if event == "open" and isinstance(args[2], int) and args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
                events.append(args[0])
            elif event in ("os.mkdir", "os.rename", "subprocess.Popen", "os.system", "os.fork"):
                events.append(event)
        sys.dont_write_bytecode = True
        sys.addaudithook(hook)
        import tkbuild.ops as ops
        ops.quant.per_token_cast(x, "e4m3", 128)
        ops.moe.topk_gate(scores, 6)
        torch.cuda.synchronize()
        print(events)
    """
    assert run(code) == ["[]"]


def test_programmatic_launch_gives_the_same_results() -> None:
    scores = torch.randn(4096, 256, device="cuda")
    plain = ops.moe.topk_gate(scores, 8)
    try:
        tkbuild.runtime.set_pdl(True)
        for _ in range(20):
            scores.mul_(1.0)
            assert torch.equal(ops.moe.topk_gate(scores, 8), plain)
    finally:
        tkbuild.runtime.set_pdl(False)


def test_num_sms_setting() -> None:
    total = torch.cuda.get_device_properties(0).multi_processor_count
    try:
        assert tkbuild.runtime.get_num_sms() == total
        tkbuild.runtime.set_num_sms(total - 20)
        assert tkbuild.runtime.get_num_sms() == total - 20
    finally:
        tkbuild.runtime.set_num_sms(0)


def test_missing_variant_is_an_error_a_caller_can_handle() -> None:
    with pytest.raises(NoVariantError) as caught:
        ops.moe.topk_gate(torch.randn(4, 2000, device="cuda"), 8)
    assert "2000" in str(caught.value)
    assert caught.value.kernel == "moe.topk_gate"


OP_CALLS = {
    "transpose": lambda: (torch.ops.tkbuild.transpose, (sample(64, 128),), {}),
    "batched_transpose": lambda: (torch.ops.tkbuild.batched_transpose, (sample(64, 128)[None],), {}),
    "per_token_cast": lambda: (
        torch.ops.tkbuild.per_token_cast,
        (sample(5, 512),),
        {"fmt": "e4m3", "block": 128, "sf_format": "ue8m0", "col_major": True, "round_sf": 1},
    ),
    "topk_gate": lambda: (torch.ops.tkbuild.topk_gate, (torch.randn(7, 72, device="cuda"),), {"num_topk": 6}),
    "sinkhorn": lambda: (torch.ops.tkbuild.mhc_sinkhorn, (torch.randn(3, 4, 4, device="cuda"),), {"repeat": 4, "eps": 1e-6}),
}


@pytest.mark.parametrize("name", OP_CALLS)
def test_opcheck(name: str) -> None:
    op, args, keywords = OP_CALLS[name]()
    opcheck(op, args, keywords)


def test_every_installed_op_is_registered() -> None:
    assert all(hasattr(torch.ops.tkbuild, signature.op) for signature in registry().signatures.values())


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's own modules, when they are first imported
def test_compiled_chain_does_not_break_the_graph() -> None:
    def chain(x: torch.Tensor) -> torch.Tensor:
        pair = ops.quant.per_token_cast(x, "e4m3", 128, use_tma_aligned_col_major_sf=True)
        back = ops.quant.per_token_cast_back(pair, "bf16", 128)
        return ops.transpose.transpose(back)

    torch._dynamo.reset()
    compiled = torch.compile(chain, fullgraph=True, dynamic=True, backend="aot_eager")
    for rows in (64, 128, 192):
        x = sample(rows, 512)
        assert torch.equal(compiled(x), chain(x))


def test_loaded_once_per_process() -> None:
    x = sample()
    cast(x)
    before = native().launch_count()
    for _ in range(10):
        cast(x)
    assert native().launch_count() == before + 10

"""Time installed kernels on a GPU, against a copy of the same size and against a peer, in one run.

Device time is that of one call inside a CUDA graph of many, each on data that has left the L2 cache. Host time is that
of one call of the public function, outputs allocated, with the device never behind.
"""

from __future__ import annotations

import functools
import importlib
import statistics
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from types import ModuleType
from typing import Any

import torch

from tkbuild.cases import Call, make_call
from tkbuild.checks import Bench, CaseValue
from tkbuild.errors import ArgumentError
from tkbuild.peers import Thunk, peer_thunk
from tkbuild.runtime import get_pdl, set_pdl
from tkbuild.runtime.op import kernel_op
from tkbuild.runtime.registry import InstalledVariant, registry
from tkbuild.verify import applicable_calls, read_checks

PEERS = ("tile_kernels", "torch")
#: Inputs rotate over this many bytes, so that none is still in the L2 cache (60 MB on H200, 126 MB on B200).
_ROTATION_BYTES = 512 * 2**20
_MAX_SETS = 64
_COPY_UNIT_BYTES = 512
_MIN_CALLS_PER_GRAPH = 24
_REPLAYS = 15
#: The driver clears freed memory in the background, 3 GB in some 8 ms on an H200, and takes a tenth of the bandwidth meanwhile.
_CLEARED_BYTES_PER_S = 2e11
_HOST_CALLS = 300
_HOST_ROUNDS = 7


@dataclass(frozen=True)
class Measurement:
    """One workload of one variant. ``cubin`` is the sha256 of the code that ran.

    Times in microseconds of one call; ``gbytes_per_s`` counts the spec's bytes; ``copy_share`` is the time of a copy that
    moves as many bytes over ours; ``peer_ratio`` is the peer's device time over ours; ``peer_error`` says why the peer has none;
    ``why`` is the spec's word for the workload, which tells apart calls that differ in their optional tensors only;
    ``pdl`` says whether the calls were launched as programmatic dependents of each other (the copy never is).
    """

    variant: str
    cubin: str
    workload: Mapping[str, CaseValue]
    moved_bytes: int
    device_us: float
    gbytes_per_s: float
    tflops_per_s: float
    copy_us: float
    copy_share: float
    host_us: float
    peer: str | None = None
    peer_us: float | None = None
    peer_host_us: float | None = None
    peer_ratio: float | None = None
    peer_error: str = ""
    why: str = ""
    pdl: bool = False

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "workload": dict(self.workload)}


def bench(
    variants: Sequence[InstalledVariant],
    *,
    device: torch.device,
    peer: str | None = None,
    pdl: bool = False,
    on_measurement: Callable[[Measurement], None],
) -> None:
    """Measure the workloads of ``variants`` on ``device``, handing on each as it is done.

    peer: ``tile_kernels`` (must be importable) or ``torch``; an operator the peer lacks has no peer figures.
    pdl: launch as programmatic dependents, by the setting of that name, ours and the peer's where it has one.
    Raises: ArgumentError for an unknown or missing peer.
    """
    peer_api = _peer_module(peer)
    settings = [(set_pdl, get_pdl())]
    if peer_api is not None and hasattr(peer_api, "set_pdl"):
        settings.append((peer_api.set_pdl, getattr(peer_api, "get_pdl", lambda: False)()))
    try:
        for setting, _ in settings:
            setting(pdl)
        _bench(variants, device, peer, peer_api, on_measurement)
    finally:
        for setting, before in settings:
            setting(before)


def _bench(
    variants: Sequence[InstalledVariant],
    device: torch.device,
    peer: str | None,
    peer_api: ModuleType | None,
    on_measurement: Callable[[Measurement], None],
) -> None:
    checks = read_checks()
    for variant in variants:
        found = checks[variant.kernel]
        if found.bench is None:
            continue
        for case, values in applicable_calls(variant, found.bench.workloads, large=True):
            fills = {**(found.verify.inputs if found.verify else {}), **(case.inputs or {})}
            measured = _measure(variant, found.bench, values, fills, device, peer, peer_api)
            on_measurement(replace(measured, why=case.why, pdl=get_pdl()))


def _measure(
    variant: InstalledVariant,
    workloads: Bench,
    values: dict[str, CaseValue],
    fills: Mapping[str, Any],
    device: torch.device,
    peer: str | None,
    peer_api: ModuleType | None,
) -> Measurement:
    generator = torch.Generator(device).manual_seed(1)
    signature = registry().signatures[variant.kernel]
    first = make_call(signature, values, fills, generator)
    sizes = first.tensor_bytes()
    moved = _moved_bytes(workloads, first, sizes)
    sets = max(2, min(_MAX_SETS, _ROTATION_BYTES // max(1, sum(sizes.values())) + 1))
    calls = [first, *(make_call(signature, values, fills, generator) for _ in range(sets - 1))]
    ours = [_our_thunk(variant.kernel, call) for call in calls]
    theirs = [] if peer is None or peer_api is None else [t for call in calls if (t := peer_thunk(variant.kernel, peer_api, call))]
    device_us = device_time_us(ours, device)
    copy_us = copy_time_us(moved, sets, device)
    peer_error = _refusal(theirs[0]) if theirs else ""
    theirs = [] if peer_error else theirs
    peer_us = device_time_us(theirs, device) if theirs else None
    flops = workloads.flops.evaluate(values, sizes)
    return Measurement(
        variant=variant.id,
        cubin=variant.record.sha256,
        workload={name: value for name, value in values.items() if name not in variant.axes},
        moved_bytes=moved,
        device_us=device_us,
        gbytes_per_s=moved / device_us / 1e3,
        tflops_per_s=flops / device_us / 1e6,
        copy_us=copy_us,
        copy_share=copy_us / device_us,
        host_us=host_time_us(ours[0], device),
        peer=peer if theirs or peer_error else None,
        peer_error=peer_error,
        peer_us=peer_us,
        peer_host_us=host_time_us(theirs[0], device) if theirs else None,
        peer_ratio=peer_us / device_us if peer_us else None,
    )


def _refusal(thunk: Thunk) -> str:
    """Call the peer once; returns why it cannot be measured, or nothing."""
    try:
        thunk()
        torch.cuda.synchronize()
    except Exception as exc:  # whatever a package of someone else raises
        return f"{type(exc).__name__}: {str(exc).strip().splitlines()[0] if str(exc).strip() else ''}"[:200]
    return ""


def _moved_bytes(workloads: Bench, call: Call, sizes: Mapping[str, int]) -> int:
    if workloads.moved_bytes is not None:
        return int(workloads.moved_bytes.evaluate(call.values, sizes))
    twice = [arg.name for arg in call.signature.args if arg.role == "inout"]
    return sum(sizes.values()) + sum(sizes[name] for name in twice)


def device_time_us(thunks: Sequence[Thunk], device: torch.device) -> float:
    """Return the median device time of one call, in microseconds, over replays of a graph of calls that rotate over ``thunks``."""
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        for thunk in thunks:
            thunk()
        stream.synchronize()
        _free_unused_memory(device)
        graph = torch.cuda.CUDAGraph()
        rounds = max(1, -(-_MIN_CALLS_PER_GRAPH // len(thunks)))
        # Outputs live as long as their inputs' next turn, so that as many of them rotate.
        kept: deque[Any] = deque(maxlen=len(thunks))
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(rounds):
                kept.extend(thunk() for thunk in thunks)
        times = [_replay_us(graph, stream) / (rounds * len(thunks)) for _ in range(_REPLAYS)]
    del kept
    return statistics.median(times[2:])


def _free_unused_memory(device: torch.device) -> None:
    """Free what a capture would free, and wait until it is cleared, which would be measured otherwise."""
    before = torch.cuda.memory_reserved(device)
    torch.cuda.empty_cache()
    time.sleep((before - torch.cuda.memory_reserved(device)) / _CLEARED_BYTES_PER_S)


def _replay_us(graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record(stream)
    graph.replay()
    end.record(stream)
    end.synchronize()
    return float(start.elapsed_time(end)) * 1e3


def host_time_us(thunk: Thunk, device: torch.device) -> float:
    """Return the host time of one call in microseconds: the least over rounds, each starting with an idle device."""
    rounds = []
    for _ in range(_HOST_ROUNDS):
        torch.cuda.synchronize(device)
        start = time.perf_counter()
        for _ in range(_HOST_CALLS):
            thunk()
        rounds.append((time.perf_counter() - start) / _HOST_CALLS * 1e6)
        torch.cuda.synchronize(device)
    return min(rounds)


def copy_time_us(moved_bytes: int, sets: int, device: torch.device) -> float:
    """Return the device time of reading half of ``moved_bytes`` and writing the other half, in microseconds.

    The better of the driver's copy and of a kernel that touches every element, since neither is best at all sizes.
    """
    elems = max(1, moved_bytes // 2 // _COPY_UNIT_BYTES) * _COPY_UNIT_BYTES // 4
    pairs = [
        (torch.empty(elems, dtype=torch.int32, device=device), torch.empty(elems, dtype=torch.int32, device=device))
        for _ in range(sets)
    ]
    for source, _ in pairs:
        source.random_()
    memcpy: list[Thunk] = [functools.partial(target.copy_, source) for source, target in pairs]
    kernel: list[Thunk] = [functools.partial(torch.bitwise_not, source, out=target) for source, target in pairs]
    return min(device_time_us(memcpy, device), device_time_us(kernel, device))


def _our_thunk(kernel: str, call: Call) -> Thunk:
    releases = (importlib.import_module(name) for name in ("tkbuild.ops", "tkbuild.ops.v1"))
    public = next((thunk for api in releases if (thunk := peer_thunk(kernel, api, call))), None)
    return public or functools.partial(kernel_op(kernel), call.input_views, call.static, call.scalars)


def _peer_module(peer: str | None) -> ModuleType | None:
    if peer is None:
        return None
    if peer not in PEERS:
        raise ArgumentError(f"unknown peer {peer!r}; expected one of {', '.join(PEERS)}", peer=peer)
    try:
        return importlib.import_module(peer)
    except ImportError as exc:
        raise ArgumentError(f"the peer {peer} cannot be imported: {exc}; put its folder on PYTHONPATH", peer=peer) from exc

"""What the native launcher must do, one function a case. Each runs in a process of its own, forked by run_cases.py."""

from __future__ import annotations

import json
import os
import random
import resource
import struct
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import tvm_ffi
from fake_driver import CPU, FakeDriver

from tkbuild.expr import Expr
from tkbuild.manifest import RUNTIME_ABI
from tkbuild.runtime.fold import fold
from tkbuild.signature import ArgSpec, DtypeRule

Json = dict[str, Any]

CUBIN = b"\x7fELF\x02\x01\x01" + bytes(57)
VARIANT = "quant.per_token_cast-bf16-b128-f32-sm_90a"
INT32_MAX = 2**31 - 1


class ArgumentError(ValueError):
    """Kind of the launcher's complaints about a call."""


class LaunchError(RuntimeError):
    """Kind of the driver's complaints."""


class DriverNotFoundError(RuntimeError):
    """Kind of a libcuda.so.1 that is missing, a stub or too old."""


class IntegrityError(RuntimeError):
    """Kind of damaged plans and cubins."""


def register_errors() -> None:
    """Tell tvm_ffi the classes of the launcher's error kinds."""
    for cls in (ArgumentError, LaunchError, DriverNotFoundError, IntegrityError):
        tvm_ffi.register_error(cls.__name__, cls)


@dataclass
class World:
    """What a case works with."""

    launcher: Any
    fake: FakeDriver
    keep: list[Any] = field(default_factory=list)

    def load(self, plan: Json, cubin: bytes = CUBIN) -> Any:
        """Return the function of a plan."""
        return self.launcher["load"](json.dumps(plan), cubin)


def tensor_arg(name: str, shape: list[Any], dtype: str = "bfloat16", role: str = "in", **more: Any) -> Json:
    return {"name": name, "kind": "tensor", "role": role, "dtype": dtype, "shape": shape, **more}


def scalar_arg(name: str, dtype: str = "int32", kind: str = "scalar") -> Json:
    return {"name": name, "kind": kind, "dtype": dtype}


def launch(params: list[Json], **more: Any) -> Json:
    return {"function": "cast_kernel", "params": params, "grid": [1, 1, 1], "block": [128, 1, 1], **more}


def make_plan(args: list[Json], launches: list[Json], **more: Any) -> Json:
    head = {"schema": 1, "kernel": "quant.per_token_cast", "variant": VARIANT, "arch": "sm_90a"}
    return {**head, "args": args, "launches": launches, **more}


def one_tensor(shape: list[Any], expr: Any = 1, dtype: str = "int64", **more: Any) -> Json:
    """A plan of one tensor ``x`` that passes ``expr`` to its kernel."""
    checks = more.pop("checks", [])
    args = [tensor_arg("x", shape, **more.pop("arg", {})), *more.pop("args", [])]
    return make_plan(args, [launch([{"value": expr, "dtype": dtype}])], checks=checks, **more)


def cast_plan(**more: Any) -> Json:
    """A plan with a bit of everything: dynamic rows, a row stride, an output, an option."""
    args = [
        tensor_arg("x", ["T", "H"], strides=["ld", 1], align=16),
        tensor_arg("out", ["T", "H"], "float8_e4m3fn", "out"),
        tensor_arg("sf", ["T", ["ceildiv", "H", "block"]], "float32", "out", strides=["sf_row", "sf_col"], align=4),
        scalar_arg("round_sf"),
        scalar_arg("col_major", "bool", "option"),
    ]
    values = [{"value": name, "dtype": "int32"} for name in ("T", "H")]
    strides = [{"value": name, "dtype": "int64"} for name in ("ld", "sf_row", "sf_col")]
    params = [{"pointer": name} for name in ("out", "sf", "x")] + values + strides
    params.append({"value": "round_sf", "dtype": "int32"})
    sizes = {"grid": [["ceildiv", "T", 4], ["//", "H", 128], 1], "dynamic_smem_bytes": 8320}
    plan = {
        "axes": {"block": 128, "in_dtype": "bfloat16"},
        "dims": {"T": {"dtype": "int32"}, "H": {"dtype": "int32"}, "ld": {"dtype": "int64"}},
        "checks": [{"require": ["==", ["%", "H", 64], 0], "text": "H % 64 == 0", "because": "hidden \u00d7 64"}],
        **more,
    }
    return make_plan(args, [launch(params, **sizes)], **plan)


CAST_SIZES = (8, 8, 8, 4, 4, 8, 8, 8, 4)


def cast_args(fake: FakeDriver, rows: int = 5, hidden: int = 256, device: int = 0) -> list[Any]:
    groups = -(-hidden // 128)
    return [
        fake.tensor((rows, hidden), strides=(hidden + 64, 1), address=0x10000, device=device),
        fake.tensor((rows, hidden), "float8_e4m3fn", address=0x20000, device=device),
        fake.tensor((rows, groups), "float32", strides=(1, rows), address=0x30000, device=device),
        1,
        False,
    ]


def value_of(world: World, plan: Json, *args: Any, size: int = 8) -> bytes:
    """Call a plan whose kernel takes one parameter, and return the bytes it got."""
    world.fake.param_sizes("cast_kernel", [size])
    world.fake.clear()
    world.load(plan)(*args)
    (entry,) = world.fake.launches()
    return bytes.fromhex(entry["params"])


# --- a call ---


def case_tensors_of_other_ranks(world: World) -> None:
    """An argument that folds takes them as ``fold`` says, every other argument refuses them."""
    choice = random.Random(1).choice
    fold_count = 0
    for _ in range(600):
        wanted = [choice(["n", 4, 6])] + [choice(["H", 4, 6]) for _ in range(choice([0, 1, 2]))]
        names = [f"s{axis}" for axis in range(len(wanted))]
        extents = [choice([1, 2, 2, 3, 4, 6]) for _ in range(choice([0, 1, 2, 3, 4]))] + [
            x for x in wanted[1:] if isinstance(x, int)
        ]
        strides, dense = [], 1
        for extent in reversed(extents):
            strides.insert(0, dense * choice([1, 1, 1, 2]))
            dense = strides[0] * extent
        arg = ArgSpec("x", "in", DtypeRule("bfloat16"), tuple(map(Expr, wanted)), tuple(map(Expr, names)), folds=True)
        seen = fold(arg, tuple(extents), tuple(strides))
        tensor = world.fake.tensor(tuple(extents), strides=tuple(strides), address=0x10000)
        plan = one_tensor(wanted, 1, arg={"strides": names, "folds": True})
        fits = seen is not None and all(
            isinstance(name, str) or name == extent for name, extent in zip(wanted, seen[0], strict=True)
        )
        fits = fits and len({extent for name, extent in zip(wanted, seen[0], strict=True) if name == "H"}) < 2
        if not fits:
            with pytest.raises(ArgumentError):
                world.load(plan)(tensor)
            continue
        fold_count += len(extents) != len(wanted)
        for place, name in enumerate(names):
            got = value_of(world, {**plan, "launches": [launch([{"value": name, "dtype": "int64"}])]}, tensor)
            matters = seen[0][place] > 1
            assert int.from_bytes(got, "little") == seen[1][place] or not matters
        if isinstance(wanted[0], str):
            got = value_of(world, {**plan, "launches": [launch([{"value": wanted[0], "dtype": "int64"}])]}, tensor)
            assert int.from_bytes(got, "little") == seen[0][0]
        if len(extents) != len(wanted):
            with pytest.raises(ArgumentError, match="dimensions, expected"):
                world.load(one_tensor(wanted, 1, arg={"strides": names}))(tensor)
    assert fold_count > 50


def case_launch_has_params_in_kernel_order(world: World) -> None:
    """Kernel parameters follow the plan, not the call; sizes and strides are exact; the stream is the current one."""
    world.fake.param_sizes("cast_kernel", CAST_SIZES)
    function = world.load(cast_plan())
    with tvm_ffi.use_raw_stream(tvm_ffi.device("cuda:0"), 0x7700):
        assert function(*cast_args(world.fake)) is None
    (entry,) = world.fake.launches()
    wanted = [0x20000, 0x30000, 0x10000, 5, 256, 320, 1, 5, 1]
    got = [int.from_bytes(bytes.fromhex(value), "little") for value in entry["params"].split(",")]
    assert got == wanted
    assert (entry["grid"], entry["block"], entry["smem"]) == ("2,2,1", "128,1,1", "8320")
    assert entry["stream"] == "0x7700"
    assert entry["attributes"] == ""


def case_load_does_not_touch_the_driver(world: World) -> None:
    """Loading and settings work before the driver is initialised."""
    world.load(cast_plan())
    world.launcher["set_pdl"](True)
    world.launcher["set_num_sms"](5)
    assert world.launcher["driver_version"]() == 13000
    assert world.fake.names() == []


def case_second_call_loads_nothing(world: World) -> None:
    """Only the context and the launch are left for later calls."""
    function = world.load(cast_plan())
    args = cast_args(world.fake)
    function(*args)
    names = world.fake.names()
    assert names.count("cuLibraryLoadData") == 1
    world.fake.clear()
    world.fake.set_current(0)
    function(*args)
    assert world.fake.names() == ["cuLaunchKernelEx"]
    assert world.launcher["launch_count"]() == 2


def case_preload_leaves_only_launches(world: World) -> None:
    """After preload the first call makes no driver call that a capture forbids, on that device."""
    function = world.load(cast_plan())
    world.launcher["preload"](function, 1)
    assert world.fake.log("cuKernelSetAttribute")[0]["device"] == "1"
    assert "cuFuncLoad" in world.fake.names()
    assert world.fake.current() == -1
    world.fake.clear()
    function(*cast_args(world.fake, device=1))
    assert world.fake.names() == ["cuCtxPushCurrent", "cuLaunchKernelEx", "cuCtxPopCurrent"]


def case_context_is_that_of_the_tensors(world: World) -> None:
    """Tensors on device 1 launch there although device 0 is current, and device 0 is current again afterwards."""
    function = world.load(cast_plan())
    world.fake.set_current(0)
    for device in (1, 0, 1):
        function(*cast_args(world.fake, device=device))
        assert world.fake.current() == 0
    assert [entry["current"] for entry in world.fake.launches()] == ["1", "0", "1"]
    assert world.fake.names().count("cuLibraryLoadData") == 1
    retained = [entry["device"] for entry in world.fake.log("cuDevicePrimaryCtxRetain")]
    assert retained == ["1", "0"]


def case_streams_are_per_device(world: World) -> None:
    """The stream is asked of the device of the tensors."""
    function = world.load(cast_plan())
    first, second = tvm_ffi.device("cuda:0"), tvm_ffi.device("cuda:1")
    with tvm_ffi.use_raw_stream(first, 0x10), tvm_ffi.use_raw_stream(second, 0x20):
        function(*cast_args(world.fake, device=1))
        function(*cast_args(world.fake, device=0))
    assert [entry["stream"] for entry in world.fake.launches()] == ["0x20", "0x10"]


def case_context_is_restored_after_a_failure(world: World) -> None:
    """A failed launch leaves the thread's context as it was."""
    function = world.load(cast_plan())
    world.fake.set_current(1)
    world.fake.fail("cuLaunchKernelEx", 700)
    with pytest.raises(LaunchError, match="CUDA_LAUNCH_BLOCKING"):
        function(*cast_args(world.fake))
    assert world.fake.current() == 1


def case_threads_race_the_first_call(world: World) -> None:
    """Many threads at once: one load, every launch done, each thread without a context of its own before."""
    function = world.load(cast_plan())
    barrier = threading.Barrier(8)
    failures: list[BaseException] = []

    def work(device: int) -> None:
        try:
            args = cast_args(world.fake, device=device)
            barrier.wait()
            for _ in range(50):
                function(*args)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(i % 2,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    names = world.fake.names()
    assert names.count("cuLibraryLoadData") == 1
    assert names.count("cuDevicePrimaryCtxRetain") == 2
    assert names.count("cuInit") == 1
    assert world.launcher["launch_count"]() == 400


def in_child(body: Any) -> str:
    """Run ``body`` in a forked process and return the text it gives back."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            text = body()
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
        os.write(write, text.encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as stream:
        text = stream.read()
    os.waitpid(pid, 0)
    return text


def case_children_forked_before_first_use_work(world: World) -> None:
    """Loading a kernel does not initialise CUDA, so children can use it."""
    function = world.load(cast_plan())

    def body() -> str:
        function(*cast_args(world.fake))
        return str(world.launcher["launch_count"]())

    assert [in_child(body) for _ in range(3)] == ["1", "1", "1"]


def case_children_forked_after_use_are_told_why_it_fails(world: World) -> None:
    """The driver does not survive a fork: the error says so instead of only 'not initialized'."""
    function = world.load(cast_plan())
    args = cast_args(world.fake)
    function(*args)

    def body() -> str:
        function(*args)
        return "no error"

    text = in_child(body)
    assert text.startswith("LaunchError: ")
    assert "CUDA_ERROR_NOT_INITIALIZED (3)" in text
    assert "spawn" in text


def case_unloading_a_function_is_safe(world: World) -> None:
    """A dropped function is no longer found, and others still work."""
    first, second = world.load(cast_plan()), world.load(cast_plan())
    first(*cast_args(world.fake))
    del first
    second(*cast_args(world.fake))
    assert len(world.fake.launches()) == 2


def peak_kib() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def case_many_calls_do_not_leak(world: World) -> None:
    """Neither good nor refused calls keep memory."""
    function = world.load(cast_plan())
    args = cast_args(world.fake)
    world.fake.record(False)
    bad = [*args[:3], "one", False]

    def calls(count: int) -> int:
        for _ in range(count):
            function(*args)
        for _ in range(count // 10):
            with pytest.raises(ArgumentError):
                function(*bad)
        return peak_kib()

    before = calls(20_000)
    after = calls(200_000)
    assert after - before < 2048, f"{after - before} KiB more after 200000 calls"


def case_loaded_kernels_free_their_memory(world: World) -> None:
    """A cubin's bytes go with the function, and as soon as the driver has its own copy."""
    cubin = CUBIN + bytes(256 * 1024)

    def rounds(count: int) -> int:
        for _ in range(count):
            world.load(cast_plan(), cubin)
            world.load(cast_plan(), cubin)(*cast_args(world.fake))
        return peak_kib()

    before = rounds(10)
    after = rounds(100)
    assert after - before < 8192, f"{after - before} KiB more after 200 kernels of 256 KiB"


# --- expressions ---


def case_expressions_compute_as_python_does(world: World) -> None:
    """Each operator, with the signs where floor and truncation differ."""
    table: list[tuple[Any, int]] = [
        (["+", "a", "b", 3], 1),
        (["-", "a", "b"], -12),
        (["-", "a"], 7),
        (["*", "a", "b"], -35),
        (["//", "a", "b"], -2),
        (["//", 7, -5], -2),
        (["//", 2**40, 3], 2**40 // 3),
        (["%", "a", "b"], 3),
        (["%", 7, -5], -3),
        (["%", "a", -1], 0),
        (["%", 10, -5], 0),
        (["ceildiv", "a", "b"], -1),
        (["ceildiv", 7, 5], 2),
        (["ceildiv", 10, 5], 2),
        (["align", 129, 128], 256),
        (["align", 128, 128], 128),
        (["gcd", 12, "a", 9], 1),
        (["gcd", -12, 18], 6),
        (["gcd", 0, 0], 0),
        (["min", 3, "a", 5], -7),
        (["max", 3, "a", "b"], 5),
        (["<", "a", "b"], 1),
        (["<=", "b", 5], 1),
        ([">", "a", "b"], 0),
        ([">=", "a", "b"], 0),
        (["==", "a", -7], 1),
        (["!=", "a", -7], 0),
        (["not", "a"], 0),
        (["not", 0], 1),
        (["and", "a", "b"], 5),
        (["and", 0, ["//", 1, 0]], 0),
        (["and", 1, 2, 0, ["//", 1, 0]], 0),
        (["or", 0, "b"], 5),
        (["or", "a", ["//", 1, 0]], -7),
        (["select", "zero", ["//", 1, "zero"], 9], 9),
        (["select", 1, "b", ["//", 1, "zero"]], 5),
        (["+", ["select", ["<", "a", 0], ["-", "a"], "a"], ["*", 2, ["or", "zero", 4]]], 15),
        ("block", 128),
        (["*", "T", "ld"], 30),
    ]
    scalars = [scalar_arg(name, "int64") for name in ("a", "b", "zero")]
    x = world.fake.tensor((3, 4), strides=(10, 1))
    for expr, wanted in table:
        plan = one_tensor(["T", 4], expr, arg={"strides": ["ld", 1]}, args=scalars, axes={"block": 128})
        got = int.from_bytes(value_of(world, plan, x, -7, 5, 0), "little", signed=True)
        assert got == wanted, f"{expr}: {got}, expected {wanted}"


def case_expression_faults_are_errors(world: World) -> None:
    """Overflow and division by zero name the expression."""
    x = world.fake.tensor((2,))
    table = [
        (["*", "n", "n"], 2**40, "overflows 64 bits"),
        (["+", "n", 1], 2**63 - 1, "overflows"),
        (["-", "n", 1], -(2**63), "overflows"),
        (["-", "n"], -(2**63), "overflows"),
        (["//", "n", -1], -(2**63), "overflows"),
        (["gcd", "n", 0], -(2**63), "overflows"),
        (["align", "n", 4], 2**63 - 1, "overflows"),
        (["//", 1, "n"], 0, "divides by zero"),
        (["%", 1, "n"], 0, "divides by zero"),
        (["ceildiv", 1, "n"], 0, "divides by zero"),
    ]
    for expr, value, text in table:
        function = world.load(one_tensor(["T"], expr, args=[scalar_arg("n", "int64")]))
        with pytest.raises(ArgumentError, match=text):
            function(x, value)
    assert world.fake.launches() == []


def case_num_sms_is_that_of_the_device_or_the_limit(world: World) -> None:
    """One kernel, devices of one arch with different SM counts; the limit never raises the count."""
    function = world.load(make_plan([tensor_arg("x", ["T"])], [launch([], grid=[["*", 2, "num_sms"], 1, 1])]))
    grids = []
    for device, limit in ((0, 0), (1, 0), (0, 100), (1, 100), (0, 0)):
        world.launcher["set_num_sms"](limit)
        world.fake.clear()
        function(world.fake.tensor((4,), device=device))
        grids.append(world.fake.launches()[0]["grid"].split(",")[0])
    assert grids == ["264", "156", "200", "156", "264"]
    world.launcher["set_num_sms"](90)
    assert [world.launcher["get_num_sms"](device) for device in (0, 1)] == [90, 78]


# --- parameters ---


def case_values_have_the_bytes_of_their_dtype(world: World) -> None:
    """Integers, bools and floats reach the kernel as the C types that it declares."""
    x = world.fake.tensor((2,))
    table: list[tuple[str, Any, bytes]] = [
        ("int32", -2, struct.pack("<i", -2)),
        ("uint32", 2**32 - 1, struct.pack("<I", 2**32 - 1)),
        ("int64", -(2**40), struct.pack("<q", -(2**40))),
        ("int8", -128, struct.pack("<b", -128)),
        ("int16", 300, struct.pack("<h", 300)),
        ("uint8", 255, b"\xff"),
        ("bool", True, b"\x01"),
        ("float32", 1.1, struct.pack("<f", 1.1)),
        ("float64", 1.1, struct.pack("<d", 1.1)),
        ("float32", 3, struct.pack("<f", 3.0)),
        ("float32", float("nan"), struct.pack("<f", float("nan"))),
        ("float32", float("-inf"), struct.pack("<f", float("-inf"))),
    ]
    for dtype, value, wanted in table:
        plan = one_tensor(["T"], "s", dtype, args=[scalar_arg("s", dtype)])
        got = value_of(world, plan, x, value, size=len(wanted))
        assert got == wanted, f"{dtype} {value}: {got.hex()}"
    assert value_of(world, one_tensor(["T"], "T", "float32"), x, size=4) == struct.pack("<f", 2.0)


def case_narrowing_is_checked(world: World) -> None:
    """A value that its parameter cannot hold is refused, never wrapped."""
    big = world.fake.tensor((2**31,))
    function = world.load(one_tensor(["T"], "T", "int32"))
    function(world.fake.tensor((INT32_MAX,)))
    with pytest.raises(ArgumentError, match=r"kernel parameter T is 2147483648, which int32 cannot hold"):
        function(big)
    function = world.load(one_tensor(["T"], "T", dims={"T": {"dtype": "int32", "min": None, "max": None}}))
    with pytest.raises(ArgumentError, match=r"T is 2147483648, expected a value from -2147483648 to 2147483647"):
        function(big)
    function = world.load(one_tensor(["T"], "T", dims={"T": {"dtype": "int64", "min": 2, "max": 4}}))
    function(world.fake.tensor((4,)))
    with pytest.raises(ArgumentError, match="T is 5, expected a value from 2 to 4"):
        function(world.fake.tensor((5,)))
    function = world.load(one_tensor(["T"], "s", "int32", args=[scalar_arg("s")]))
    with pytest.raises(ArgumentError, match=r"s: got 2147483648, expected a value from -2147483648"):
        function(world.fake.tensor((2,)), 2**31)
    assert len(world.fake.launches()) == 2


def case_tensor_maps_are_encoded_and_passed_by_value(world: World) -> None:
    """Every field of a descriptor, once per call though two parameters share it; 128 bytes reach the kernel."""
    tensor_map = {
        "arg": "x",
        "dtype": 9,
        "rank": 2,
        "dims": ["H", "T"],
        "strides": [["*", "ld", 2]],
        "box": [64, 128],
        "elem_strides": [1, 1],
        "interleave": 0,
        "swizzle": 3,
        "l2": 2,
        "oob": 1,
    }
    params: list[Json] = [{"tensor_map": 0}, {"value": "T", "dtype": "int32"}, {"tensor_map": 0}]
    plan = make_plan([tensor_arg("x", ["T", "H"], strides=["ld", 1])], [launch(params)], tensor_maps=[tensor_map])
    world.fake.param_sizes("cast_kernel", [128, 4, 128])
    world.load(plan)(world.fake.tensor((30, 256), strides=(320, 1), address=0xABC000))
    (entry,) = world.fake.log("cuTensorMapEncodeTiled")
    entry.pop("call")
    assert entry == {
        "dtype": "9",
        "rank": "2",
        "address": "0xabc000",
        "dims": "256,30",
        "strides": "640",
        "box": "64,128",
        "elem": "1,1",
        "interleave": "0",
        "swizzle": "3",
        "l2": "2",
        "oob": "1",
    }
    first, rows, second = world.fake.launches()[0]["params"].split(",")
    words = [0xABC000, *(0x1111111111111111 * i for i in range(1, 16))]
    assert bytes.fromhex(first) == struct.pack("<16Q", *words)
    assert second == first
    assert rows == "1e000000"


def case_tensor_map_failures_say_what_was_encoded(world: World) -> None:
    """A misaligned row stride is the usual reason: the numbers are in the text."""
    tensor_map = {"arg": "x", "dtype": 9, "rank": 1, "dims": ["T"], "strides": [], "box": ["T"], "elem_strides": [1]}
    tensor_map |= {"interleave": 0, "swizzle": 0, "l2": 0, "oob": 0}
    plan = make_plan([tensor_arg("x", ["T"])], [launch([{"tensor_map": 0}])], tensor_maps=[tensor_map])
    function = world.load(plan)
    with pytest.raises(LaunchError, match=r"tensor map of x at 0x1008, rank 1, sizes \(20\).*INVALID_VALUE \(1\)"):
        function(world.fake.tensor((20,), address=0x1008))
    with pytest.raises(ArgumentError, match="tensor map box = T is 257, expected a value from 1 to 256"):
        function(world.fake.tensor((257,)))


def case_absent_optional_tensors(world: World) -> None:
    """None is a null pointer, its names are 0, and it is refused where the plan does not allow it."""
    args = [tensor_arg("x", ["T"]), tensor_arg("w", ["K"], "float32", optional=True)]
    params = [{"pointer": "w"}, {"value": "K", "dtype": "int32"}]
    world.fake.param_sizes("cast_kernel", [8, 4])
    function = world.load(make_plan(args, [launch(params)]))
    function(world.fake.tensor((4,)), None)
    function(world.fake.tensor((4,)), world.fake.tensor((3,), "float32", address=0x5000))
    assert [entry["params"] for entry in world.fake.launches()] == [
        "0000000000000000,00000000",
        "0050000000000000,03000000",
    ]
    with pytest.raises(ArgumentError, match=f"{VARIANT}: x: got None, expected a CUDA tensor of dtype bfloat16"):
        function(None, None)


# --- launch attributes ---


def case_launch_attributes_only_as_needed(world: World) -> None:
    """Cluster, cooperative and programmatic launches, alone and together."""
    table: list[tuple[Json, bool, str]] = [
        ({}, True, ""),
        ({"cluster": [1, 1, 1]}, False, ""),
        ({"cluster": [2, 1, 1], "grid": [4, 1, 1]}, False, "4:2,1,1"),
        ({"cooperative": True}, False, "2:1"),
        ({"programmatic": "off"}, True, ""),
        ({"programmatic": "setting"}, False, ""),
        ({"programmatic": "setting"}, True, "6:1"),
        ({"programmatic": "on"}, False, "6:1"),
        (
            {"cluster": [2, 2, 1], "grid": [4, 2, 1], "cooperative": True, "programmatic": "on"},
            False,
            "4:2,2,1;2:1;6:1",
        ),
    ]
    x = world.fake.tensor((4,))
    world.fake.blocks_per_sm(8)
    for more, pdl, wanted in table:
        world.launcher["set_pdl"](pdl)
        assert world.launcher["get_pdl"]() is pdl
        world.fake.clear()
        world.load(make_plan([tensor_arg("x", ["T"])], [launch([], **more)]))(x)
        assert world.fake.launches()[0]["attributes"] == wanted, more


def case_cooperative_grids_must_be_resident(world: World) -> None:
    """A grid barrier over blocks that cannot all run would hang: refused before the launch, per device."""
    more = {"cooperative": True, "grid": ["T", 1, 1], "dynamic_smem_bytes": 1024}
    function = world.load(make_plan([tensor_arg("x", ["T"])], [launch([], **more)]))
    function(world.fake.tensor((264,)))
    with pytest.raises(LaunchError, match=r"cuda:0: .*265 blocks, but at most 264 can be resident on the 132 SMs"):
        function(world.fake.tensor((265,)))
    with pytest.raises(LaunchError, match=r"cuda:1: .*264 blocks, but at most 156"):
        function(world.fake.tensor((264,), device=1))
    assert len(world.fake.launches()) == 1
    asked = world.fake.log("cuOccupancyMaxActiveBlocksPerMultiprocessor")
    assert [(entry["threads"], entry["smem"]) for entry in asked] == [("128", "1024")] * 2
    plan = make_plan([tensor_arg("x", ["T"])], [launch([], cluster=[4, 1, 1], **more)])
    with pytest.raises(LaunchError, match="12 blocks, but at most 8 can be resident"):
        world.load(plan)(world.fake.tensor((12,)))


def case_shared_memory_is_granted_per_device(world: World) -> None:
    """Beyond 48 KiB the driver wants an attribute, on each device; a size from the call raises it when it grows."""
    plan = make_plan([tensor_arg("x", ["T"])], [launch([], dynamic_smem_bytes=200 * 1024)])
    function = world.load(plan)
    for device in (0, 1):
        function(world.fake.tensor((4,), device=device))
    granted = world.fake.log("cuKernelSetAttribute")
    assert [(entry["device"], entry["attribute"], entry["value"]) for entry in granted] == [
        ("0", "8", "204800"),
        ("1", "8", "204800"),
    ]
    world.fake.clear()
    function = world.load(make_plan([tensor_arg("x", ["T"])], [launch([], dynamic_smem_bytes=["*", "T", 1024])]))
    for rows in (60, 50, 100):
        function(world.fake.tensor((rows,)))
    assert [entry["value"] for entry in world.fake.log("cuKernelSetAttribute")] == ["61440", "102400"]
    with pytest.raises(LaunchError, match=r"307200 bytes of dynamic shared memory per block: .*INVALID_VALUE"):
        function(world.fake.tensor((300,)))


def case_large_clusters_are_allowed_first(world: World) -> None:
    """More than 8 blocks a cluster need a function attribute."""
    plan = make_plan([tensor_arg("x", ["T"])], [launch([], cluster=[16, 1, 1], grid=[16, 1, 1])])
    world.load(plan)(world.fake.tensor((4,)))
    (entry,) = world.fake.log("cuKernelSetAttribute")
    assert (entry["attribute"], entry["value"]) == ("14", "1")


def case_sizes_beyond_the_hardware_are_refused(world: World) -> None:
    """Grid, block and cluster limits, and grids that clusters do not divide."""
    table: list[tuple[Json, str]] = [
        ({"grid": ["n", 1, 1]}, "grid.x = n is 2147483648, expected a value from 0 to 2147483647"),
        ({"grid": [1, "n", 1]}, "grid.y = n is"),
        ({"grid": [["-", "n"], 1, 1]}, r"grid.x = -n is -2147483648"),
        ({"block": ["n", 1, 1]}, "block.x = n is"),
        ({"grid": [3, 1, 1], "cluster": [2, 1, 1]}, r"grid.x is 3, expected a multiple of cluster.x = 2"),
        ({"dynamic_smem_bytes": ["-", 0, "n"]}, "dynamic_smem_bytes = "),
    ]
    for more, text in table:
        plan = make_plan([tensor_arg("x", ["T"]), scalar_arg("n", "int64")], [launch([], **more)])
        with pytest.raises(ArgumentError, match=text):
            world.load(plan)(world.fake.tensor((4,)), 2**31)
    assert world.fake.launches() == []


def case_several_launches_run_in_order(world: World) -> None:
    """Two kernels of one plan, the first with an empty grid for some calls."""
    first = {**launch([], grid=[["//", "T", 8], 1, 1]), "function": "first"}
    second = {**launch([]), "function": "second"}
    function = world.load(make_plan([tensor_arg("x", ["T"])], [first, second]))
    function(world.fake.tensor((8,)))
    function(world.fake.tensor((7,)))
    assert [entry["name"] for entry in world.fake.launches()] == ["first", "second", "second"]


def case_a_launch_that_a_call_does_not_use_limits_no_size(world: World) -> None:
    """No blocks along x: the other extents may be beyond what a grid may have."""
    few = {**launch([], grid=[["select", ["<=", "T", 512], 1, 0], "T", 1]), "function": "few"}
    many = {**launch([], grid=["T", 1, 1]), "function": "many"}
    function = world.load(make_plan([tensor_arg("x", ["T"])], [few, many]))
    function(world.fake.tensor((131071,)))
    assert [entry["name"] for entry in world.fake.launches()] == ["many"]


# --- empty tensors, strides, layouts ---


def case_empty_outputs_launch_nothing(world: World) -> None:
    """No rows: checked, but no launch and no load, whatever the strides of the empty tensors are."""
    function = world.load(cast_plan())
    x = world.fake.tensor((0, 256), strides=(7, 9), address=0)
    out = world.fake.tensor((0, 256), "float8_e4m3fn", strides=(1, 3), address=0)
    sf = world.fake.tensor((0, 2), "float32", strides=(0, 0), address=0)
    function(x, out, sf, 1, False)
    assert world.fake.names() == []
    with pytest.raises(ArgumentError, match="out: size of dimension 1 is 128, expected H = 256"):
        function(x, world.fake.tensor((0, 128), "float8_e4m3fn"), sf, 1, False)


def case_empty_inputs_alone_still_launch(world: World) -> None:
    """A kernel that zeroes its output must run when only its input is empty; without outputs all must be empty."""
    plan = make_plan([tensor_arg("x", ["T"]), tensor_arg("counts", ["E"], "int32", "out")], [launch([])])
    world.load(plan)(world.fake.tensor((0,)), world.fake.tensor((8,), "int32"))
    assert len(world.fake.launches()) == 1
    plan = make_plan([tensor_arg("x", ["T"]), tensor_arg("y", ["E"], role="inout")], [launch([])])
    function = world.load(plan)
    function(world.fake.tensor((0,)), world.fake.tensor((8,)))
    function(world.fake.tensor((0,)), world.fake.tensor((0,)))
    assert len(world.fake.launches()) == 2


def case_strides_of_sizes_up_to_one_do_not_matter(world: World) -> None:
    """They are not checked, and a name bound by one takes the C-contiguous value, or that of a tensor where it counts."""
    plan = one_tensor(["T", 4096], "ld", arg={"strides": ["ld", 1]})
    for strides in ((999, 1), (0, 1), (-5, 1)):
        got = value_of(world, plan, world.fake.tensor((1, 4096), strides=strides))
        assert int.from_bytes(got, "little") == 4096
    plan = one_tensor(["A", "B", "C"], "s", arg={"strides": ["s", "t", "u"]})
    got = value_of(world, plan, world.fake.tensor((1, 1, 4), strides=(77, 55, 1)))
    assert int.from_bytes(got, "little") == 4
    plan = one_tensor(["A", 8], "ld", arg={"strides": ["ld", 1]}, args=[tensor_arg("y", ["B", 8], strides=["ld", 1])])
    first, second = world.fake.tensor((1, 8), strides=(3, 1)), world.fake.tensor((5, 8), strides=(64, 1))
    assert int.from_bytes(value_of(world, plan, first, second), "little") == 64
    assert int.from_bytes(value_of(world, plan, second, first), "little") == 64
    contiguous = world.load(one_tensor(["A", "B"]))
    contiguous(world.fake.tensor((1, 8), strides=(1, 1)))
    contiguous(world.fake.tensor((8, 1), strides=(1, 8)))


def case_wrong_layouts_are_refused(world: World) -> None:
    """Transposed, column-sliced, expanded and negative layouts, for inputs and outputs."""
    table: list[tuple[str, tuple[int, ...], tuple[int, ...], list[Any], str]] = [
        ("in", (1024, 8), (1, 1024), [], r"stride of dimension 1 is 1024, expected 1 \(C-contiguous\).*\(1024, 8\)"),
        ("in", (4, 8), (16, 2), ["ld", 1], "stride of dimension 1 is 2, expected 1"),
        ("in", (4, 8), (-8, 1), ["ld", 1], "stride of dimension 0 is -8, expected no negative stride"),
        ("out", (4, 8), (0, 1), ["ld", 1], "stride of dimension 0 is 0, expected elements that do not overlap"),
        ("out", (4, 8), (7, 1), ["ld", 1], "stride of dimension 0 is 7, expected at least 8: its elements overlap"),
        ("inout", (4, 8), (7, 1), ["ld", 1], "stride of dimension 0 is 7, expected at least 8: its elements overlap"),
        ("out", (4, 8), (1, 3), ["a", "b"], "stride of dimension 1 is 3, expected at least 4: its elements overlap"),
        ("out", (4, 8), (1, 1), ["a", "b"], "expected at least [48]: its elements overlap"),
        ("in", (4, 8), (9, 1), [["*", "B", 1], 1], r"stride of dimension 0 is 9, expected \(B \* 1\) = 8"),
    ]
    for role, shape, strides, wanted, text in table:
        arg = tensor_arg("x", ["A", "B"], role=role)
        if wanted:
            arg["strides"] = wanted
        function = world.load(make_plan([arg], [launch([])]))
        with pytest.raises(ArgumentError, match=text):
            function(world.fake.tensor(shape, strides=strides))
    assert world.fake.launches() == []
    expanded = world.load(one_tensor(["A", "B"], "ld", arg={"strides": ["ld", 1]}))
    expanded(world.fake.tensor((4, 8), strides=(0, 1)))
    written = world.load(make_plan([tensor_arg("x", ["A", "B"], role="out", strides=["a", "b"])], [launch([])]))
    for strides in ((8, 1), (20, 1), (1, 4), (1, 9)):
        written(world.fake.tensor((4, 8), strides=strides))
    assert len(world.fake.launches()) == 5


def case_names_bind_in_any_order_of_use(world: World) -> None:
    """An expression may stand before the argument that binds its names."""
    args = [tensor_arg("sf", [["ceildiv", "H", 128]]), tensor_arg("x", ["T", "H"])]
    function = world.load(make_plan(args, [launch([])]))
    function(world.fake.tensor((3,)), world.fake.tensor((2, 300)))
    with pytest.raises(ArgumentError, match=r"sf: size of dimension 0 is 4, expected ceildiv\(H, 128\) = 3"):
        function(world.fake.tensor((4,)), world.fake.tensor((2, 300)))


# --- refused calls ---


def case_argument_errors_say_what_was_got_and_expected(world: World) -> None:
    """Every kind of wrong argument, by its text; nothing is launched."""
    fake = world.fake
    function = world.load(cast_plan())
    good = cast_args(fake)
    table: list[tuple[int, Any, str]] = [
        (0, fake.tensor((5, 256), "float16"), "x: dtype float16, expected bfloat16"),
        (0, fake.tensor((5, 256), (4, 16, 2)), r"x: dtype \? \(DLPack code 4, 16 bits, 2 lanes\), expected bfloat16"),
        (0, fake.tensor((5, 256), (200, 16, 1)), r"x: dtype \? .*code 200"),
        (1, fake.tensor((5, 256), "float8_e5m2"), "out: dtype float8_e5m2, expected float8_e4m3fn"),
        (0, fake.tensor((5, 2, 128)), r"x: 3 dimensions, expected 2; its shape is \(5, 2, 128\)"),
        (0, fake.tensor((6, 256)), r"out: size of dimension 0 is 5, expected T = 6; its shape is \(5, 256\)"),
        (2, fake.tensor((5, 3), "float32"), r"sf: size of dimension 1 is 3, expected ceildiv\(H, block\) = 2"),
        (0, fake.tensor((5, 256), address=0x1008), "x: address 0x1008, expected a multiple of 16 bytes"),
        (0, fake.tensor((5, 256), address=0), "x: has no memory"),
        (0, fake.tensor((5, 256), device_type=CPU), r"x: is not on a CUDA device \(DLPack device type 1\)"),
        (2, fake.tensor((5, 2), "float32", device=1), "sf: is on cuda:1, expected cuda:0"),
        (0, torch.empty(5, 256, dtype=torch.bfloat16), "x: is not on a CUDA device"),
        (0, None, "x: got None, expected a CUDA tensor of dtype bfloat16"),
        (0, 3, "x: got int, expected a CUDA tensor"),
        (0, "text", "x: got str, expected a CUDA tensor"),
        (0, [good[0]], "x: got an object of another type"),
        (0, object(), "x: got an object of another type"),
        (3, 1.5, "round_sf: got float, expected int32"),
        (3, float("nan"), "round_sf: got float"),
        (3, None, "round_sf: got None, expected int32"),
        (3, "1", "round_sf: got str"),
        (3, b"\x01", "round_sf: got bytes"),
        (3, torch.tensor(1), "round_sf: got a tensor"),
        (4, 2, r"col_major: got 2, expected a value from 0 to 1 \(bool\)"),
    ]
    for index, value, text in table:
        args = [*good[:index], value, *good[index + 1 :]]
        with pytest.raises(ArgumentError, match=text) as caught:
            function(*args)
        assert str(caught.value).startswith(VARIANT + ": ")
    for count in (0, 4):
        with pytest.raises(ArgumentError, match=f"{VARIANT}: got {count} arguments, expected 5"):
            function(*good[:count])
    with pytest.raises(ArgumentError, match="got 200 arguments"):
        function(*[good[0]] * 200)
    with pytest.raises(OverflowError):
        function(*good[:3], 2**70, False)
    assert world.fake.names() == []
    function(*good)


def case_requirements_name_the_values(world: World) -> None:
    """A refused check gives its text, its reason and what the names in it were."""
    function = world.load(cast_plan())
    with pytest.raises(ArgumentError) as caught:
        function(*cast_args(world.fake, hidden=100))
    assert str(caught.value) == f"{VARIANT}: requires H % 64 == 0, got H = 100: hidden \u00d7 64"
    assert world.fake.launches() == []


def case_every_dtype_is_told_apart(world: World) -> None:
    """Each name in a plan takes tensors of that dtype and refuses those of all others."""
    names = ["bfloat16", "float16", "float32", "float64", "float8_e4m3fn", "float8_e5m2", "int8", "uint8", "int16"]
    names += ["int32", "int64", "uint32", "bool"]
    tensors = {name: world.fake.tensor((4,), name) for name in names}
    for wanted in names:
        function = world.load(make_plan([tensor_arg("x", ["T"], wanted)], [launch([])]))
        for name, tensor in tensors.items():
            if name == wanted:
                function(tensor)
                continue
            with pytest.raises(ArgumentError, match=f"x: dtype {name}, expected {wanted}$"):
                function(tensor)
    assert len(world.fake.launches()) == len(names)


def case_torch_exports_the_codes_that_plans_name(world: World) -> None:
    """The DLPack codes of torch tensors, float8 included: only the device is left to complain about."""
    for name in ("bfloat16", "float16", "float32", "float8_e4m3fn", "float8_e5m2", "int64", "uint32", "bool"):
        function = world.load(make_plan([tensor_arg("x", ["T"], name)], [launch([])]))
        with pytest.raises(ArgumentError, match="is not on a CUDA device"):
            function(torch.empty(4, dtype=getattr(torch, name)))


# --- the driver ---


def case_driver_errors_are_typed_and_named(world: World) -> None:
    """Each driver call that can fail: class, variant, device, call, name and number; a later call works."""
    table = [
        ("cuInit", 999, r"cuInit failed: unknown error \(999\), no description"),
        ("cuDeviceGet", 101, r"cuda:0: cuDeviceGet failed: CUDA_ERROR_INVALID_DEVICE \(101\)"),
        ("cuDeviceGetAttribute", 1, "cuda:0: cuDeviceGetAttribute failed"),
        ("cuDevicePrimaryCtxRetain", 2, "cuDevicePrimaryCtxRetain failed: CUDA_ERROR_OUT_OF_MEMORY.*free memory"),
        ("cuCtxGetCurrent", 201, f"{VARIANT} on cuda:0: cuCtxPushCurrent failed"),
        ("cuLibraryLoadData", 209, f"{VARIANT} on cuda:0: cuLibraryLoadData failed: .*NO_BINARY_FOR_GPU.*update the driver"),
        ("cuLibraryGetKernel", 500, "function cast_kernel: cuLibraryGetKernel failed: CUDA_ERROR_NOT_FOUND"),
        ("cuKernelSetAttribute", 1, "8320 bytes of dynamic shared memory"),
        ("cuKernelGetFunction", 2, "cuKernelGetFunction failed"),
        ("cuFuncLoad", 900, "cuFuncLoad failed: .*call preload before the capture"),
        ("cuLaunchKernelEx", 1, r"function cast_kernel, grid \(2, 2, 1\), block \(128, 1, 1\), 8320 bytes.*INVALID_VALUE"),
    ]
    function = world.load(cast_plan())
    args = cast_args(world.fake)
    for call, code, text in table:
        world.fake.fail(call, code)
        with pytest.raises(LaunchError, match=text) as caught:
            function(*args)
        assert f"({code})" in str(caught.value)
        assert "driver for CUDA 13.0" in str(caught.value)
    function(*args)
    assert world.launcher["launch_count"]() == 1


def case_other_archs_are_refused_before_loading(world: World) -> None:
    """The device of the tensors decides, one refusal does not spoil other devices, and 'f' and plain targets widen."""
    function = world.load(cast_plan())
    with pytest.raises(LaunchError, match=r"cuda:2 has compute capability 10.0, but the kernel is built for sm_90a"):
        function(*cast_args(world.fake, device=2))
    assert "cuLibraryLoadData" not in world.fake.names()
    function(*cast_args(world.fake, device=1))
    x = {device: world.fake.tensor((4,), device=device) for device in (0, 2)}
    table = [("sm_90", 0, True), ("sm_80", 0, False), ("sm_100f", 2, True), ("sm_100a", 2, True), ("sm_103a", 2, False)]
    table += [("sm_103f", 2, False), ("sm_100", 2, True), ("sm_120f", 2, False), ("sm_100f", 0, False)]
    for arch, device, fits in table:
        function = world.load({**one_tensor(["T"]), "arch": arch})
        if fits:
            function(x[device])
            continue
        with pytest.raises(LaunchError, match=f"built for {arch}"):
            function(x[device])


def case_device_facts(world: World) -> None:
    """Questions about devices make no context."""
    assert world.launcher["device_count"]() == 3
    assert [tuple(world.launcher["compute_capability"](device)) for device in range(3)] == [(9, 0), (9, 0), (10, 0)]
    assert [world.launcher["get_num_sms"](device) for device in range(3)] == [132, 78, 148]
    assert world.launcher["abi"]() == RUNTIME_ABI
    assert world.fake.names() == ["cuInit"] * len(world.fake.names())
    with pytest.raises(LaunchError, match=r"cuda:3: cuDeviceGet failed: CUDA_ERROR_INVALID_DEVICE"):
        world.launcher["compute_capability"](3)


def case_no_device(world: World) -> None:
    """A driver without a GPU counts 0 devices and explains a launch."""
    world.fake.no_devices()
    assert world.launcher["device_count"]() == 0
    function = world.load(cast_plan())
    with pytest.raises(LaunchError, match=r"CUDA_ERROR_NO_DEVICE \(100\).*CUDA_VISIBLE_DEVICES"):
        function(*cast_args(world.fake))


def case_stub_library(world: World) -> None:
    """The stub of a toolkit is no driver."""
    world.fake.fail("cuInit", 34)
    with pytest.raises(DriverNotFoundError, match="stub"):
        world.load(cast_plan())(*cast_args(world.fake))


def case_exported_functions_check_their_arguments(world: World) -> None:
    """Wrong counts and types are errors, never crashes."""
    function = world.load(cast_plan())
    other = tvm_ffi.convert(lambda: None)
    table: list[tuple[str, tuple[Any, ...], str]] = [
        ("load", (), "load: got 0 arguments, expected 2"),
        ("load", (1, CUBIN), "plan_json: expected str or bytes"),
        ("load", (json.dumps(cast_plan()), None), "cubin: expected str or bytes"),
        ("preload", (function,), "got 1 arguments"),
        ("preload", (other, 0), "expected one that load"),
        ("preload", (None, 0), "expected one that load"),
        ("preload", (function, -1), "device: expected an int from 0 to 63"),
        ("preload", (function, "0"), "device: expected an int"),
        ("set_num_sms", (-1,), "limit: expected an int from 0"),
        ("set_num_sms", (True,), "limit: expected an int"),
        ("get_num_sms", (64,), "device: expected an int from 0 to 63"),
        ("set_pdl", (1,), "expected a bool"),
        ("get_pdl", (1,), "got 1 arguments, expected 0"),
        ("abi", (1,), "got 1 arguments"),
        ("launch_count", (1,), "got 1 arguments"),
        ("device_count", (1,), "got 1 arguments"),
        ("driver_version", (1,), "got 1 arguments"),
        ("compute_capability", ("x",), "device: expected an int"),
    ]
    for name, args, text in table:
        with pytest.raises(ArgumentError, match=text):
            world.launcher[name](*args)
    with pytest.raises(ArgumentError, match="cuda:99: expected a device from 0 to 63"):
        function(*cast_args(world.fake, device=99))


# --- damaged plans and cubins ---


def case_damaged_cubins_are_refused(world: World) -> None:
    """The driver is not told the length, so a cut file must not reach it."""
    sections = bytearray(CUBIN + bytes(64))
    struct.pack_into("<Q", sections, 40, 64)  # e_shoff
    struct.pack_into("<HH", sections, 58, 64, 1)  # e_shentsize, e_shnum
    world.load(cast_plan(), bytes(sections))
    outside = bytearray(sections)
    struct.pack_into("<IIQQQQ", outside, 64, 0, 1, 0, 0, 0, 2**40)  # a section longer than the file
    for cubin, text in [
        (b"", "of 0 bytes: shorter than an ELF header"),
        (b"ELF", "shorter"),
        (b"\x7fELF\x01" + bytes(60), "no 64-bit ELF file"),
        (bytes(64), "no 64-bit ELF file"),
        (bytes(sections[:100]), "section headers are cut off"),
        (bytes(outside), "a section is cut off"),
    ]:
        with pytest.raises(IntegrityError, match=text):
            world.load(cast_plan(), cubin)


def case_damaged_plans_are_refused(world: World) -> None:
    """Not JSON, another schema, unknown keys, names, operators and dtypes: each with its place."""
    texts = ["", "{", "[]", "nul", '{"a": 1.5}', '{"a": 1, "a": 2}', "[" * 100_000, '{"a": "\\ud800"}', '{"a": "\x01"}']
    texts += ['{"a": 99999999999999999999}', "{} x", '{"a": "\\u12"}', '{"a": "abc\\', '{"a" 1}', "\x00"]
    for text in texts:
        with pytest.raises(IntegrityError, match="launch plan"):
            world.launcher["load"](text, CUBIN)
    x = tensor_arg("x", ["T"])
    table: list[tuple[Json, str]] = [
        ({"schema": 2}, "schema 2, expected 1"),
        ({"schema": None}, "schema"),
        ({"surprise": 1}, "unknown key 'surprise'; upgrade tkbuild"),
        ({"arch": "sm90a"}, "arch: expected sm_<NN>"),
        ({"arch": "sm_90b"}, "arch: expected"),
        ({"variant": None}, "variant"),
        ({"args": None}, "args: expected an array"),
        ({"args": []}, "a tensor that is not optional"),
        ({"args": [x, x]}, r"args\[1\].name: expected a name that no other"),
        ({"args": [{**x, "dtype": "float7"}]}, r"args\[0\].dtype: unknown dtype 'float7'"),
        ({"args": [{**x, "role": "inn"}]}, r"args\[0\].role"),
        ({"args": [{**x, "kind": "thing"}]}, r"args\[0\].kind"),
        ({"args": [{**x, "align": 3}]}, r"args\[0\].align: expected a power of two"),
        ({"args": [{**x, "strides": [1, 1]}]}, r"args\[0\].strides: expected as many"),
        ({"args": [{**x, "shape": ["T"] * 9}]}, r"args\[0\].shape: expected an array of at most 8"),
        ({"args": [x, scalar_arg("s", "bfloat16")]}, r"args\[1\].dtype: expected an integer dtype"),
        ({"args": [tensor_arg(f"x{j}", [f"d{j}{i}" for i in range(8)]) for j in range(8)]}, "at most 63 dims"),
        ({"dims": {"Q": {}}}, "dims.Q: expected a name"),
        ({"dims": {"T": {"dtype": "float32"}}}, "dims.T.dtype"),
        ({"dims": {"T": {"min": "1"}}}, "dims.T.min: expected an integer"),
        ({"checks": [{"require": "Q"}]}, r"checks\[0\].require: 'Q' is not an integer"),
        ({"checks": [{"require": ["^", 1, 2]}]}, r"unknown operator '\^'"),
        ({"checks": [{"require": ["+", 1]}]}, "operator '\\+' got 1 operands"),
        ({"checks": [{"require": ["-", 1, 2, 3]}]}, "got 3 operands"),
        ({"checks": [{"require": {}}]}, "expected an int, a name or"),
        ({"checks": [{"require": []}]}, r"expected \[op"),
        ({"checks": [{"require": ["+", *range(300)]}]}, "too long"),
        ({"tensor_maps": [{"arg": "y"}]}, r"tensor_maps\[0\].arg: expected the name of a tensor"),
        ({"tensor_maps": [{"arg": "x", "dtype": 9, "rank": 6}]}, r"rank: expected an integer from 1 to 5"),
        ({"launches": []}, "at least one launch"),
        ({"launches": [launch([{"pointer": "q"}])]}, r"launches\[0\].params\[0\].pointer"),
        ({"launches": [launch([{"tensor_map": 0}])]}, r"params\[0\].tensor_map"),
        ({"launches": [launch([{}])]}, "expected one of pointer, tensor_map and value"),
        ({"launches": [launch([{"value": "T", "dtype": "bfloat16"}])]}, r"params\[0\].dtype"),
        ({"launches": [launch([{"value": "x", "dtype": "int32"}])]}, "'x' is not an integer"),
        ({"launches": [launch([], grid=[1, 1])]}, "grid: expected 3 entries"),
        ({"launches": [launch([], programmatic="yes")]}, "programmatic: expected off, setting or on"),
        ({"launches": [launch([], cooperative=1)]}, "cooperative: expected true or false"),
        ({"launches": [launch([], stream=1)]}, "unknown key 'stream'"),
    ]
    deep: Any = 1
    for _ in range(40):
        deep = ["+", 1, deep]
    table.append(({"checks": [{"require": deep}]}, "nested too deeply"))
    for change, text in table:
        with pytest.raises(IntegrityError, match=text):
            world.load({**one_tensor(["T"]), **change})


def case_cut_plans_never_crash(world: World) -> None:
    """Every prefix of a plan, and the plan with each byte changed, is a plan or an IntegrityError."""
    text = json.dumps(cast_plan())
    for end in range(len(text)):
        with pytest.raises(IntegrityError):
            world.launcher["load"](text[:end], CUBIN)
    for index in range(len(text)):
        for replacement in ("{", "9", '"', "\\"):
            try:
                world.launcher["load"](text[:index] + replacement + text[index + 1 :], CUBIN)
            except IntegrityError:
                continue


def case_plan_text_keeps_its_characters(world: World) -> None:
    """Escapes in JSON strings reach messages as UTF-8, beyond the basic plane too."""
    because = 'tab\t "quoted" \\ \u00e9 \u4e2d \U0001f600'
    plan = one_tensor(["T"], checks=[{"require": ["==", "T", 1], "text": "T == 1", "because": because}])
    for ascii_only in (True, False):
        function = world.launcher["load"](json.dumps(plan, ensure_ascii=ascii_only), CUBIN)
        with pytest.raises(ArgumentError) as caught:
            function(world.fake.tensor((2,)))
        assert because in str(caught.value)


# --- other drivers: these load their own libcuda.so.1, or none ---


def case_missing_driver(launcher: Any, folder: Path) -> None:
    """The first libcuda.so.1 found is no library: loading kernels works, using them says what to install."""
    assert not (folder / "missing" / "libcuda.so.1").read_bytes().startswith(b"\x7fELF")
    function = launcher["load"](json.dumps(make_plan([tensor_arg("x", ["T"])], [launch([])])), CUBIN)
    for call in (launcher["driver_version"], launcher["device_count"], lambda: launcher["preload"](function, 0)):
        with pytest.raises(DriverNotFoundError, match=r"libcuda.so.1 cannot be loaded .*install it"):
            call()


def case_old_driver(launcher: Any, folder: Path) -> None:
    """A driver from before CUDA 12 is named with its version and the one needed."""
    FakeDriver(folder / "old").version(11080)
    with pytest.raises(DriverNotFoundError, match=r"CUDA 11.8 and lacks cuLibraryLoadData; expected CUDA 12.0 or newer"):
        launcher["device_count"]()


WITHOUT_WORLD = (case_missing_driver, case_old_driver)

"""The stand-in driver as seen from Python: settings, the log of calls, and tensors that claim to be on a GPU."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tvm_ffi

CUDA = 2
CPU = 1

# DLPack: code, bits, lanes
DTYPES = {
    "bfloat16": (4, 16, 1),
    "float16": (2, 16, 1),
    "float32": (2, 32, 1),
    "float64": (2, 64, 1),
    "float8_e4m3fn": (10, 8, 1),
    "float8_e5m2": (12, 8, 1),
    "int8": (0, 8, 1),
    "uint8": (1, 8, 1),
    "int16": (0, 16, 1),
    "int32": (0, 32, 1),
    "int64": (0, 64, 1),
    "uint32": (1, 32, 1),
    "bool": (6, 8, 1),
}


class FakeDriver:
    """Controls of the stand-in that ``folder`` holds."""

    def __init__(self, folder: Path) -> None:
        self._library = ctypes.CDLL(str(folder / "libcuda.so.1"))
        self._library.fake_log.restype = ctypes.c_char_p
        functions = tvm_ffi.load_module(str(folder / "libfake_cuda.so"))
        self._make_tensor = functions["make_tensor"]

    def log(self, call: str = "") -> list[dict[str, str]]:
        """Return the recorded calls, all or those of one name: their fields, with the name under ``call``."""
        lines = self._library.fake_log().decode().splitlines()
        calls = []
        for line in lines:
            name, *fields = line.split()
            calls.append({"call": name, **dict(field.split("=", 1) for field in fields)})
        return [entry for entry in calls if call in ("", entry["call"])]

    def names(self) -> list[str]:
        """Return the names of the recorded calls in order."""
        return [entry["call"] for entry in self.log()]

    def launches(self) -> list[dict[str, str]]:
        """Return the recorded launches."""
        return self.log("cuLaunchKernelEx")

    def clear(self) -> None:
        """Forget the recorded calls."""
        self._library.fake_clear()

    def record(self, on: bool) -> None:
        """Switch recording and programmed failures on or off."""
        self._library.fake_record(int(on))

    def version(self, version: int) -> None:
        """Set the driver version, 13000 for CUDA 13.0."""
        self._library.fake_version(version)

    def blocks_per_sm(self, blocks: int) -> None:
        """Set what occupancy queries answer."""
        self._library.fake_blocks_per_sm(blocks)

    def no_devices(self) -> None:
        """Take all devices away."""
        self._library.fake_no_devices()

    def fail(self, call: str, code: int, countdown: int = 1) -> None:
        """Let the ``countdown``-th next call of a driver function return ``code``."""
        self._library.fake_fail(call.encode(), countdown, code)

    def param_sizes(self, function: str, sizes: Sequence[int]) -> None:
        """Tell the sizes in bytes of a kernel's parameters, which the real driver reads from the cubin."""
        self._library.fake_param_sizes(function.encode(), (ctypes.c_int * len(sizes))(*sizes), len(sizes))

    def set_current(self, device: int) -> None:
        """Make the primary context of a device current in this thread; -1: none."""
        self._library.fake_set_current(device)

    def current(self) -> int:
        """Return the device of this thread's current context, -1 for none."""
        return int(self._library.fake_current())

    def tensor(
        self,
        shape: Sequence[int],
        dtype: str | tuple[int, int, int] = "bfloat16",
        *,
        strides: Sequence[int] | None = None,
        device: int = 0,
        device_type: int = CUDA,
        address: int = 0x1000,
    ) -> Any:
        """Return a tensor without memory behind it; without strides DLPack says it is C-contiguous."""
        code = DTYPES[dtype] if isinstance(dtype, str) else dtype
        layout = [*shape, *(strides or ())]
        return self._make_tensor(address, *code, device_type, device, int(strides is not None), *layout)

"""The door to the native launcher: loads its library through tvm-ffi and gives its functions Python types.

Nothing here touches the CUDA driver; the library opens it at the first call that needs a device.
"""

from __future__ import annotations

import functools
import json
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import torch  # tvm_ffi must find torch imported, else it imports it itself under another environment

from tkbuild import launcher as launcher_package
from tkbuild.errors import ArgumentError, DriverNotFoundError, IntegrityError, LaunchError, PackageError, pip_install
from tkbuild.manifest import RUNTIME_ABI

LIBRARY_NAME = "libtkbuild_launcher.so"
#: torch exports its own DLPack exchange table from 2.10 on; with it, tvm-ffi needs no extension built at import.
_SKIP_DLPACK_EXTENSION = "TVM_FFI_DISABLE_TORCH_C_DLPACK"

LaunchFunction = Callable[..., None]


def _import_tvm_ffi() -> ModuleType:
    """Import tvm_ffi without the probe of CUDA and the compile that its import does for older versions of torch.

    The probe initialises the driver, which breaks children forked later. Can go when apache-tvm-ffi looks at
    ``torch.Tensor.__dlpack_c_exchange_api__`` before it asks for CUDA.
    """
    if "tvm_ffi" in sys.modules:
        return sys.modules["tvm_ffi"]
    if not hasattr(torch.Tensor, "__dlpack_c_exchange_api__"):
        raise PackageError(f"torch {torch.__version__} is too old: tkbuild needs torch 2.10 or later; pip install 'torch>=2.10'")
    before = os.environ.get(_SKIP_DLPACK_EXTENSION)
    os.environ[_SKIP_DLPACK_EXTENSION] = "1"
    try:
        import tvm_ffi
    finally:
        if before is None:
            del os.environ[_SKIP_DLPACK_EXTENSION]
        else:
            os.environ[_SKIP_DLPACK_EXTENSION] = before
    return tvm_ffi  # type: ignore[no-any-return]


class NativeLauncher:
    """The functions of the native library. One instance a process, from ``native()``."""

    def __init__(self, library: Path) -> None:
        tvm_ffi = _import_tvm_ffi()
        for error in (LaunchError, ArgumentError, DriverNotFoundError, IntegrityError):
            tvm_ffi.register_error(error.__name__, error)
        if not library.is_file():
            raise PackageError(
                f"{library} is missing: the native launcher was not built; "
                f"in a checkout, pip install --no-deps --editable . builds it; elsewhere {pip_install('tkbuild')}",
                library=str(library),
            )
        module = tvm_ffi.load_module(str(library))
        self._module = module
        if int(module.abi()) != RUNTIME_ABI:
            raise PackageError(
                f"{library} speaks runtime ABI {int(module.abi())}, this package {RUNTIME_ABI}: {pip_install('tkbuild')}",
                library=str(library),
            )
        self.preload: Callable[[LaunchFunction, int], None] = module.preload
        self.set_num_sms: Callable[[int], None] = module.set_num_sms
        self.set_pdl: Callable[[bool], None] = module.set_pdl

    def load(self, launch_plan: Mapping[str, Any], cubin: bytes) -> LaunchFunction:
        """Return the function that launches ``launch_plan`` with ``cubin``; the driver is not touched.

        Called with the plan's arguments in order; see DESIGN.md section 3. Raises: IntegrityError for a plan or
        cubin that is not what the launcher reads.
        """
        function: LaunchFunction = self._module.load(json.dumps(launch_plan), cubin)
        return function

    def num_sms(self, device: int) -> int:
        """Return the SM count kernels on ``device`` launch for: the set limit, else the device's own."""
        return int(self._module.get_num_sms(device))

    def pdl(self) -> bool:
        """Return whether kernels with ``programmatic: setting`` launch as programmatic dependents."""
        return bool(self._module.get_pdl())

    def compute_capability(self, device: int) -> tuple[int, int]:
        """Return (major, minor) of ``device``. Raises: DriverNotFoundError, LaunchError."""
        major, minor = self._module.compute_capability(device)
        return int(major), int(minor)

    def device_count(self) -> int:
        """Return how many CUDA devices the driver shows. Raises: DriverNotFoundError."""
        return int(self._module.device_count())

    def driver_version(self) -> tuple[int, int]:
        """Return the CUDA version the driver supports, (major, minor). Raises: DriverNotFoundError."""
        version = int(self._module.driver_version())
        return version // 1000, version % 1000 // 10

    def launch_count(self) -> int:
        """Return how many kernels this process has launched."""
        return int(self._module.launch_count())


@functools.cache
def native() -> NativeLauncher:
    """Return the process's launcher, loading its library at the first call.

    Raises: PackageError if the library is missing or belongs to another version.
    """
    return NativeLauncher(Path(launcher_package.__file__).parent / LIBRARY_NAME)

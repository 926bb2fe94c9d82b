"""Process-wide settings of the operators. They act at launch; none of them selects another kernel."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from tkbuild.errors import ArgumentError
from tkbuild.runtime import get_num_sms as _num_sms_of
from tkbuild.runtime import get_pdl, set_num_sms, set_pdl

__all__ = [
    "get_amax_clamp_for_quant",
    "get_deterministic_algorithms",
    "get_device_num_sms",
    "get_max_smem_per_sm",
    "get_num_sms",
    "get_pdl",
    "get_token_alignment",
    "reset_runtime_config",
    "set_amax_clamp_for_quant",
    "set_num_sms",
    "set_pdl",
    "set_token_alignment",
    "use_deterministic_algorithms",
]

_DEFAULT_TOKEN_ALIGNMENT = 128
_E4M3_SUBNORMAL, _MIN_NORMAL = 2.0**-9, 2.0**-126
_E4M3_MAX, _E2M1_MAX = 448.0, 6.0
LEAST_CLAMPS = {"e4m3": 2e-36, "e2m1": 7e-38}
LARGEST_CLAMP = torch.finfo(torch.float32).max
#: (target format, scales are e4m3) -> least abs-max of a block.
_DEFAULT_CLAMPS = {
    ("e4m3", False): 1e-4,
    ("e4m3", True): _E4M3_MAX * _E4M3_SUBNORMAL,
    ("e2m1", False): _E2M1_MAX * _MIN_NORMAL,
    ("e2m1", True): _E2M1_MAX * _E4M3_SUBNORMAL,
}


@dataclass
class Settings:
    token_alignment: int = _DEFAULT_TOKEN_ALIGNMENT
    deterministic: bool = False
    clamps: dict[tuple[str, bool], float] = field(default_factory=lambda: dict(_DEFAULT_CLAMPS))


#: The present values; operators read them at each call.
settings = Settings()


def get_num_sms() -> int:
    """Return the SM count that persistent kernels launch for on the current device."""
    return _num_sms_of(torch.cuda.current_device())


def get_device_num_sms() -> int:
    """Return the SM count of the current device."""
    return int(torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count)


def get_max_smem_per_sm() -> int:
    """Return the shared memory of an SM of the current device, in bytes."""
    return int(torch.cuda.get_device_properties(torch.cuda.current_device()).shared_memory_per_multiprocessor)


def set_token_alignment(token_alignment: int) -> None:
    """Set the row alignment of each expert in the prefix layout, in rows. Raises: ArgumentError unless a number from 1 to 2**31 - 1."""
    if not isinstance(token_alignment, int) or not 1 <= token_alignment < 2**31:
        raise ArgumentError(f"token_alignment is {token_alignment}, expected a whole number of rows from 1 to 2147483647")
    settings.token_alignment = token_alignment


def get_token_alignment() -> int:
    """Return the row alignment of each expert in the prefix layout, in rows."""
    return settings.token_alignment


def use_deterministic_algorithms(enabled: bool) -> None:
    """Ask for deterministic algorithms. Every operator shipped here is deterministic already."""
    settings.deterministic = bool(enabled)


def get_deterministic_algorithms() -> bool:
    """Return whether deterministic algorithms were asked for."""
    return settings.deterministic


def set_amax_clamp_for_quant(fmt: str, use_e4m3_sf: bool, clamp_min_value: float) -> None:
    """Set the least abs-max of a quantised block.

    Raises: ArgumentError for an unknown format, and for a value whose quotients with the format's largest number leave float32:
    below 2e-36 for 'e4m3' and 7e-38 for 'e2m1', or above the largest float32.
    """
    key = _clamp_key(fmt, use_e4m3_sf)
    least = LEAST_CLAMPS[fmt]
    if not least <= clamp_min_value <= LARGEST_CLAMP:
        raise ArgumentError(f"clamp_min_value is {clamp_min_value}, expected a number from {least} to {LARGEST_CLAMP:.6g}")
    settings.clamps[key] = float(clamp_min_value)


def get_amax_clamp_for_quant(fmt: str, use_e4m3_sf: bool) -> float:
    """Return the least abs-max of a quantised block of ``fmt``."""
    return settings.clamps[_clamp_key(fmt, use_e4m3_sf)]


def reset_runtime_config() -> None:
    """Put every setting back to its default."""
    fresh = Settings()
    settings.token_alignment, settings.deterministic, settings.clamps = fresh.token_alignment, fresh.deterministic, fresh.clamps
    set_num_sms(0)
    set_pdl(False)


def _clamp_key(fmt: str, use_e4m3_sf: bool) -> tuple[str, bool]:
    key = (fmt, bool(use_e4m3_sf))
    if key not in _DEFAULT_CLAMPS:
        raise ArgumentError(f"fmt is {fmt!r}, expected 'e4m3' or 'e2m1'", fmt=fmt)
    return key

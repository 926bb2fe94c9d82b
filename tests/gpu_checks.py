"""What the GPU tests share: what they need, comparison of bytes, torch's own check of an operator."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch

from tkbuild.runtime import set_pdl
from tkbuild.runtime.registry import registry

_UTILITIES = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")


def on_gpu_with(*kernels: str) -> list[pytest.MarkDecorator]:
    """Return the marks of tests that need a GPU and ``kernels``, which wheels of the default profile may lack."""
    missing = [kernel for kernel in kernels if kernel not in registry().signatures]
    return [pytest.mark.gpu, pytest.mark.skipif(bool(missing), reason=f"not installed: {', '.join(missing)} (profile full)")]


def bytes_of(x: torch.Tensor) -> torch.Tensor:
    """Return the elements' bytes in row-major order, whatever the strides."""
    # Not contiguous(): it keeps the strides of a tensor with one element, whatever they are.
    return torch.empty(x.shape, dtype=x.dtype, device=x.device).copy_(x).view(-1).view(torch.uint8)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether dtype, shape and bytes are equal, so that NaN payloads and the sign of zero count; strides do not."""
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(bytes_of(a), bytes_of(b))


def same_with_programmatic_launches(chain: Callable[[], Sequence[torch.Tensor]]) -> bool:
    """Whether 20 runs of ``chain`` as programmatic dependents all give the bytes of one run without."""
    wanted = chain()
    set_pdl(True)
    try:
        return all(same(a, b) for _ in range(20) for a, b in zip(chain(), wanted, strict=True))
    finally:
        set_pdl(False)


def opcheck(op: Any, args: Sequence[Any], keywords: Mapping[str, Any] | None = None) -> None:
    """Run ``torch.library.opcheck``. Its schema check does arithmetic on the inputs, which torch lacks for 8-bit floats."""
    is_float8 = any(isinstance(arg, torch.Tensor) and arg.dtype == torch.float8_e4m3fn for arg in args)
    torch.library.opcheck(op, tuple(args), dict(keywords or {}), test_utils=_UTILITIES[1:] if is_float8 else _UTILITIES)

"""Normal random numbers: torch's own generator and kernels, on the current CUDA device unless another one is named."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["randn", "randn_like", "set_seed"]


def randn(*size: Any, **keywords: Any) -> torch.Tensor:
    """Return ``torch.randn`` of the arguments, on the current CUDA device unless ``device`` or ``out`` says otherwise."""
    if "out" not in keywords and keywords.get("device") is None:
        keywords["device"] = "cuda"
    result: torch.Tensor = torch.randn(*size, **keywords)
    return result


def randn_like(input: torch.Tensor, **keywords: Any) -> torch.Tensor:
    """Return ``torch.randn_like`` of the arguments."""
    return torch.randn_like(input, **keywords)


def set_seed(seed: int) -> None:
    """Seed torch's generators, those of all devices: equal seeds give equal numbers."""
    torch.manual_seed(seed)

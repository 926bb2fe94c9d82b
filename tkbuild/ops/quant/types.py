"""The pair that quantised data travels in."""

from __future__ import annotations

import torch

QuantTensor = tuple[torch.Tensor, torch.Tensor]
"""Quantised data with its scale factors."""

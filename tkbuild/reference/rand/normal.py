"""References of the normal random numbers: torch's own."""

from __future__ import annotations

from torch import manual_seed as set_seed
from torch import randn, randn_like

__all__ = ["randn", "randn_like", "set_seed"]

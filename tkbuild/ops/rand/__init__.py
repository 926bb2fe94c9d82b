"""Random numbers."""

from tkbuild.ops.rand.normal import randn, randn_like, set_seed

__all__ = ["randn", "randn_like", "set_seed"]

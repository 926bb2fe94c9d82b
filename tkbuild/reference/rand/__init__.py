"""References of the random numbers."""

from tkbuild.reference.rand.normal import randn, randn_like, set_seed

__all__ = ["randn", "randn_like", "set_seed"]

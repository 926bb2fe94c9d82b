"""References of the transforms."""

from tkbuild.reference.transform.rotary import apply_rotary

__all__ = ["apply_rotary"]

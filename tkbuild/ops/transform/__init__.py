"""Transforms of activations."""

from tkbuild.ops.transform.rotary import apply_rotary

__all__ = ["apply_rotary"]

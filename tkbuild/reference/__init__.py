"""Torch references of the kernels, one module a family: plain torch, right on any device, never modifying their inputs."""

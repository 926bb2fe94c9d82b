"""tkbuild: compile TileLang GPU kernels ahead of time, package them, and load them where no compiler is.

This package imports nothing, so that the runtime half never pulls in the build half.
"""

__version__ = "0.1.0"

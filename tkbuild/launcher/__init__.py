"""The native launcher: C++ sources, and ``libtkbuild_launcher.so`` once built.

It reads launch plans, checks calls against them and launches cubins through the CUDA driver; no Python is in it.
``tkbuild.runtime.launcher`` is the only door to the library; ``hatch_build.py`` builds it.
"""

"""Target architectures: one strict spelling, their order, which devices run them, and what a template may know."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from tkbuild.errors import ArgumentError, PatternError

Capability = tuple[int, int]
"""What a device has: (major, minor) compute capability."""

_GRAMMAR = re.compile(r"(?:(?:sm_)?([1-9][0-9]{1,2})|([1-9][0-9]?)\.([0-9]))([af]?)", re.ASCII)
_EXPECTED = "expected sm_<major><minor>[a|f], for instance sm_90a or sm_100f (90a and 9.0a are understood too)"
_FIRST_MAJOR = {"a": 9, "f": 10}


@dataclass(frozen=True, order=True)
class TargetArch:
    """What a kernel is compiled for: ``sm_90a`` is major 9, minor 0, suffix 'a'.

    Suffix 'a': runs on exactly this capability. Suffix 'f': runs on its family, the same major from this minor on.
    No suffix: runs on the same major from this minor on, without architecture-specific instructions.
    Sorts by number, then suffix: sm_90, sm_90a, sm_100a, sm_100f, sm_103a.
    """

    major: int
    minor: int
    suffix: str = ""

    def __post_init__(self) -> None:
        first = _FIRST_MAJOR.get(self.suffix, 0)
        if self.suffix not in ("", "a", "f") or self.major < first:
            raise ArgumentError(f"no arch {self}: suffix 'a' exists from sm_90 on, 'f' from sm_100 on; {_EXPECTED}", arch=str(self))

    def __str__(self) -> str:
        return f"sm_{self.major}{self.minor}{self.suffix}"

    @classmethod
    def parse(cls, text: object) -> TargetArch:
        """Return the arch that ``text`` spells; every accepted spelling has one canonical form, ``str(arch)``.

        Raises: ArgumentError with the nearest right spelling, for anything else, numbers included.
        """
        match = _GRAMMAR.fullmatch(text) if isinstance(text, str) else None
        if match is None:
            raise ArgumentError(f"{text!r} is no target arch{_hint(text)}; {_EXPECTED}", arch=text)
        digits, major, minor, suffix = match.groups()
        if digits:
            return cls(int(digits[:-1]), int(digits[-1]), suffix)
        return cls(int(major), int(minor), suffix)

    def runs_on(self, capability: Capability) -> bool:
        """Whether a device of ``capability`` can run binaries of this arch."""
        major, minor = capability
        if self.suffix == "a":
            return (major, minor) == (self.major, self.minor)
        return major == self.major and minor >= self.minor

    @property
    def compute(self) -> str:
        """The name of the virtual arch, as nvcc spells it: ``compute_90a``."""
        return f"compute_{self.major}{self.minor}{self.suffix}"

    @property
    def wheel_suffix(self) -> str:
        """The spelling used in names of distributions: ``sm90a``."""
        return f"sm{self.major}{self.minor}{self.suffix}"


def split_pattern(pattern: str) -> tuple[str, TargetArch | None]:
    """Return the glob over kernel names and variant ids that ``pattern`` is, and the arch that it may end in: ``quant.*@sm_90a``.

    Raises: PatternError for text behind the ``@`` that is no arch.
    """
    glob, at, arch = pattern.rpartition("@")
    try:
        return (glob or "*", TargetArch.parse(arch)) if at else (pattern, None)
    except ArgumentError as exc:
        raise PatternError(f"{pattern}: {exc.message}", pattern=pattern) from exc


def best_first(archs: Iterable[TargetArch], capability: Capability) -> list[TargetArch]:
    """Return those of ``archs`` that run on ``capability``: the exact ones first, then family, then plain targets.

    Within family and plain targets, the nearest minor version comes first.
    """
    order = {"a": 0, "f": 1, "": 2}
    fitting = [arch for arch in set(archs) if arch.runs_on(capability)]
    return sorted(fitting, key=lambda arch: (order[arch.suffix], -arch.minor))


def archs_for(capability: Capability) -> list[TargetArch]:
    """Return the archs to build for a device of ``capability``, best first: what an error tells the user to add."""
    major, minor = capability
    if major < _FIRST_MAJOR["a"]:
        return [TargetArch(major, minor)]
    exact = [TargetArch(major, minor, "a")]
    return exact + ([TargetArch(major, 0, "f")] if major >= _FIRST_MAJOR["f"] else [])


@dataclass(frozen=True)
class TargetProfile:
    """What a template may know about a target, sizes in bytes; the number of SMs is a launch-time value."""

    arch: str
    vector_bytes: int
    smem_per_block: int
    smem_per_sm: int
    max_threads: int


_KIB = 1024
# Shared memory per block is what a kernel can opt in to: the SM's, less 1 KiB that the system keeps for each block.
# 32-byte vector loads exist from sm_100 on (PTX ISA 8.8, ld with .v8.b32).
_PROFILES = {
    profile.arch: profile
    for profile in (
        TargetProfile("sm_90a", 16, 227 * _KIB, 228 * _KIB, 1024),
        TargetProfile("sm_100a", 32, 227 * _KIB, 228 * _KIB, 1024),
        TargetProfile("sm_100f", 32, 227 * _KIB, 228 * _KIB, 1024),
        TargetProfile("sm_103a", 32, 227 * _KIB, 228 * _KIB, 1024),
        TargetProfile("sm_120a", 32, 99 * _KIB, 100 * _KIB, 1024),
    )
}
_LEAST_TOOLKIT = {
    "sm_90a": (12, 0),
    "sm_100a": (12, 8),
    "sm_100f": (12, 9),
    "sm_103a": (12, 9),
    "sm_120a": (12, 8),
}

SUPPORTED: tuple[TargetArch, ...] = tuple(sorted(TargetArch.parse(name) for name in _PROFILES))
"""The archs tkbuild compiles for, in order."""


def target_profile(arch: TargetArch) -> TargetProfile:
    """Return what templates see as ``target`` when they are rendered for ``arch``.

    Raises: ArgumentError for an arch that tkbuild does not compile for.
    """
    return _PROFILES[_supported(arch)]


def least_toolkit(arch: TargetArch) -> tuple[int, int]:
    """Return the first CUDA toolkit, (major, minor), that compiles for ``arch``.

    Raises: ArgumentError for an arch that tkbuild does not compile for.
    """
    return _LEAST_TOOLKIT[_supported(arch)]


def _supported(arch: TargetArch) -> str:
    name = str(arch)
    if name not in _PROFILES:
        more = f"; did you mean {name}a?" if f"{name}a" in _PROFILES else ""
        known = ", ".join(map(str, SUPPORTED))
        raise ArgumentError(f"tkbuild does not compile for {name}{more}; supported: {known}", arch=name)
    return name


def _hint(text: object) -> str:
    """Return ``; did you mean sm_90a?`` for a spelling that shows what was meant, else nothing."""
    if isinstance(text, bool) or not isinstance(text, (str, int, float)):
        return ""
    bare = re.sub(r"^(sm|compute)", "", re.sub(r"[\s_]", "", str(text).lower()))
    match = _GRAMMAR.fullmatch(re.sub(r"\.(?=[af]$)", "", bare))
    if match is None:
        return ""
    digits, major, minor, suffix = match.groups()
    return f"; did you mean sm_{digits or major + minor}{suffix}?"

"""How a build runs."""

from __future__ import annotations

from dataclasses import dataclass

from tkbuild.errors import ArgumentError

STEP_TIMEOUT_S = 600.0
# Waiting in the operating system takes no more than 2**31 milliseconds.
_MAX_STEP_TIMEOUT_S = 1e6


@dataclass(frozen=True)
class BuildOptions:
    """How a build runs; nothing here can change its results. jobs None: as many as cores and memory allow.

    Raises: ArgumentError for a time that is no time to wait.
    """

    jobs: int | None = None
    step_timeout_s: float = STEP_TIMEOUT_S
    share_headers: bool = True

    def __post_init__(self) -> None:
        if not 0 < self.step_timeout_s <= _MAX_STEP_TIMEOUT_S:  # refuses NaN as well
            raise ArgumentError(
                f"--timeout {self.step_timeout_s:g}: expected more than 0 and at most {_MAX_STEP_TIMEOUT_S:.0f} seconds",
                step_timeout_s=self.step_timeout_s,
            )

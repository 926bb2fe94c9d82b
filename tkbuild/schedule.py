"""How many steps run at once, and in which order kernels are compiled: those with the same headers one after the other."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable
from typing import Any

from tkbuild.errors import ArgumentError
from tkbuild.frontend import CannotFork, split_headers
from tkbuild.machine import available_bytes, usable_cores
from tkbuild.plan import CompileStep

# What one job may need: a front end with its headers, an assembler, a share of TileLang.
_JOB_BYTES = 1_500_000_000


def job_count(cores: int, memory_bytes: int, wanted: int | None) -> int:
    """Return how many steps run at once. Raises: ArgumentError for fewer than one."""
    if wanted is not None and wanted < 1:
        raise ArgumentError(f"-j {wanted}: expected at least 1", jobs=wanted)
    return wanted or max(1, min(cores, memory_bytes // _JOB_BYTES))


def machine_job_count(wanted: int | None) -> int:
    """Return how many steps run at once on this machine. Raises: ArgumentError for fewer than one."""
    return job_count(usable_cores(), available_bytes(), wanted)


def header_group(step: CompileStep) -> tuple[str, ...]:
    """Return what compile steps have in common that can share a front end."""
    try:
        headers = split_headers(step.cuda_source)[0]
    except CannotFork:
        headers = ""
    return (headers, str(step.arch), *step.flags)


class CompileQueue:
    """Hands out items group by group. A worker stays with its group; a free one goes where most work per worker is left."""

    def __init__(self, items: Iterable[tuple[Any, Any]]) -> None:
        self._lock = threading.Lock()
        self._left: dict[Any, list[Any]] = {}
        self._workers: Counter[Any] = Counter()
        for group, item in items:
            self._left.setdefault(group, []).append(item)
        self._sizes = {group: len(items) for group, items in self._left.items()}

    def is_shared(self, group: Any) -> bool:
        """Whether the group began with more than one item."""
        return self._sizes[group] > 1

    def take(self, group: Any) -> tuple[Any, Any] | None:
        """Return the next group and item for a worker whose last item was of ``group`` (None: its first), or None at the end."""
        with self._lock:
            if not self._left.get(group):
                if group is not None:
                    self._workers[group] -= 1
                group = max((one for one, items in self._left.items() if items), key=self._share, default=None)
                if group is None:
                    return None
                self._workers[group] += 1
            return group, self._left[group].pop(0)

    def _share(self, group: Any) -> float:
        return len(self._left[group]) / (self._workers[group] + 1)

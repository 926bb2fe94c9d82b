"""What this process may use of the machine: cores and memory, within the limits of its control groups. Leaf."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

_ROOT = Path("/")


def usable_cores(root: Path = _ROOT) -> int:
    """Return how many cores the process may keep busy: those it is bound to, or fewer where a group has a quota (rounded up)."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    for folder in _groups(root):
        with suppress(OSError, ValueError, ZeroDivisionError):
            quota, period = (folder / "cpu.max").read_text().split()
            cores = min(cores, math.ceil(int(quota) / int(period)))
    return max(1, cores)


def available_bytes(root: Path = _ROOT) -> int:
    """Return how much memory the process could still take without swapping.

    The page cache counts as free, since it gives way: after a build most memory is page cache.
    """
    available = [_machine_bytes(root)]
    for folder in _groups(root):
        with suppress(OSError, ValueError):
            limit, used = int((folder / "memory.max").read_text()), int((folder / "memory.current").read_text())
            available.append(limit - used + _number(folder / "memory.stat", "inactive_file"))
    return max(0, min(available))


def _machine_bytes(root: Path) -> int:
    with suppress(OSError, ValueError):
        return _number(root / "proc/meminfo", "MemAvailable:") * 1024
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _number(path: Path, name: str) -> int:
    """Return the number behind ``name`` in a file of lines. Raises: ValueError, OSError."""
    found = re.search(rf"^{re.escape(name)}\s+(\d+)", path.read_text(), re.MULTILINE)
    if found is None:
        raise ValueError(f"{path} has no {name}")
    return int(found.group(1))


def _groups(root: Path) -> Iterator[Path]:
    """Yield the folders of the process's control group and those around it (version 2); nothing where there are none."""
    with suppress(OSError):
        found = re.search(r"^0::/(.*)$", (root / "proc/self/cgroup").read_text(), re.MULTILINE)
        group = Path(found.group(1)) if found else None
        if group is not None:
            yield from (root / "sys/fs/cgroup" / part for part in (group, *group.parents))

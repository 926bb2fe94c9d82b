"""Cores and memory that a build may use."""

from __future__ import annotations

from pathlib import Path

import pytest

from tkbuild.machine import available_bytes, usable_cores

_MEMINFO = "MemTotal:       24000000 kB\nMemFree:          500000 kB\nMemAvailable:   20000000 kB\nCached:         19000000 kB\n"


def _write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_page_cache_is_free(tmp_path: Path) -> None:
    assert available_bytes(_write(tmp_path, {"proc/meminfo": _MEMINFO})) == 20_000_000 * 1024


@pytest.mark.parametrize(
    ("group", "folder"),
    [("/", "sys/fs/cgroup"), ("/a/b", "sys/fs/cgroup/a/b"), ("/a/b", "sys/fs/cgroup/a"), ("/a", "sys/fs/cgroup")],
)
def test_the_limit_of_any_group_around_counts(tmp_path: Path, group: str, folder: str) -> None:
    _write(
        tmp_path,
        {
            "proc/meminfo": _MEMINFO,
            "proc/self/cgroup": f"0::{group}\n",
            f"{folder}/memory.max": "8000000000\n",
            f"{folder}/memory.current": "6000000000\n",
            f"{folder}/memory.stat": "anon 1000000000\ninactive_file 4500000000\nactive_file 500000000\n",
        },
    )
    assert available_bytes(tmp_path) == 6_500_000_000


@pytest.mark.parametrize("limit", ["max\n", "", "99999999999999\n"])
def test_a_group_without_a_limit_changes_nothing(tmp_path: Path, limit: str) -> None:
    files = {"proc/meminfo": _MEMINFO, "proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": limit}
    files |= {"sys/fs/cgroup/memory.current": "1000\n", "sys/fs/cgroup/memory.stat": "inactive_file 0\n"}
    assert available_bytes(_write(tmp_path, files)) == 20_000_000 * 1024


def test_without_such_files_the_system_is_asked(tmp_path: Path) -> None:
    assert available_bytes(tmp_path) > 0
    assert usable_cores() >= 1


@pytest.mark.parametrize(("quota", "most"), [("150000 100000", 2), ("50000 100000", 1), ("max 100000", 1000)])
def test_a_quota_bounds_the_cores(tmp_path: Path, quota: str, most: int) -> None:
    root = _write(tmp_path, {"proc/self/cgroup": "0::/a\n", "sys/fs/cgroup/a/cpu.max": f"{quota}\n"})
    assert usable_cores(root) == min(usable_cores(tmp_path / "nothing"), most)

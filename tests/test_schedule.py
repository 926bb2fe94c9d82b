"""How many steps run at once, and in which order kernels are compiled."""

from __future__ import annotations

import pytest

from tkbuild.errors import ArgumentError
from tkbuild.schedule import CompileQueue, job_count


def test_jobs_are_bounded() -> None:
    assert job_count(16, 128 << 30, None) == 16
    assert job_count(16, 6 << 30, None) == 4
    assert job_count(16, 1 << 20, None) == 1
    assert job_count(2, 1 << 20, 8) == 8
    with pytest.raises(ArgumentError, match="-j 0"):
        job_count(2, 1 << 34, 0)


def test_workers_stay_with_their_group_and_spread_over_groups() -> None:
    queue = CompileQueue([("a", 1), ("b", 2), ("a", 3), ("b", 4), ("a", 5), ("c", 6)])
    assert queue.take(None) == ("a", 1)
    assert queue.take(None) == ("b", 2)
    assert queue.take("a") == ("a", 3)
    assert queue.take("b") == ("b", 4)
    assert queue.take("b") == ("c", 6)
    assert queue.take("c") == ("a", 5)
    assert queue.take("a") is None
    assert queue.take("a") is None
    assert (queue.is_shared("a"), queue.is_shared("c")) == (True, False)

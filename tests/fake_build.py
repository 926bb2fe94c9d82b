"""Builds with fake tools: a lowering worker without TileLang and a toolkit of shell scripts."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from fake_toolkit import FakeToolkit

from tkbuild import lowering
from tkbuild.arch import TargetArch
from tkbuild.build import BuildEvent, BuildOptions, BuildResult, build
from tkbuild.expr import Expr
from tkbuild.facts import BuildFacts
from tkbuild.plan import BuildRequest, make_plan
from tkbuild.signature import ArgSpec, DtypeRule, KernelSignature
from tkbuild.store import Store
from tkbuild.toolchain import TileLangPackage

SM_90A, SM_100A = TargetArch.parse("sm_90a"), TargetArch.parse("sm_100a")
SIGNATURE = KernelSignature("t.k", "", "", "t_k", args=(ArgSpec("x", "inout", DtypeRule("float32"), (Expr("T"),)),))
FACTS = BuildFacts({"tilelang": "fake"}, {"cuda": "fake"})
TILELANG = TileLangPackage("0.1.15", "d", "h", ())
FAKE_WORKER = (str(Path(__file__).with_name("fake_lower_worker.py")),)


def request(name: str, source: str = "", arch: TargetArch = SM_90A, **changes: object) -> BuildRequest:
    plain = BuildRequest(f"t.k-{name}-{arch}", arch, SIGNATURE, {}, source or f"# {name}\n", {}, {}, (), {"spill_bytes": 0})
    return replace(plain, **changes)  # type: ignore[arg-type]


class Builder:
    """Builds with fake tools in one folder and keeps what was reported."""

    def __init__(self, folder: Path) -> None:
        self.kit = FakeToolkit.create(folder / "cuda")
        self.store = Store(folder / "artifacts")
        self.events: list[BuildEvent] = []

    def __call__(self, *requests: BuildRequest, facts: BuildFacts = FACTS, **options: object) -> BuildResult:
        self.events = []
        given = BuildOptions(**{"jobs": 2, **options})  # type: ignore[arg-type]
        return build(make_plan(requests, facts), self.store, self.kit.toolchain(), TILELANG, given, self.events.append)

    def kinds(self) -> list[str]:
        return [event.kind for event in self.events]


def use_fake_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lower with fake_lower_worker.py during the test."""
    monkeypatch.setattr(lowering, "LOWER_WORKER", FAKE_WORKER)


def full_disk(monkeypatch: pytest.MonkeyPatch, free_bytes: int) -> None:
    """Let every disk have ``free_bytes`` left during the test."""
    usage = SimpleNamespace(total=1 << 40, used=(1 << 40) - free_bytes, free=free_bytes)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)

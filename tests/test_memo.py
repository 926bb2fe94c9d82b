"""What a remembered build depends on."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from fake_build import FACTS

from tkbuild import memo
from tkbuild.facts import BuildFacts
from tkbuild.memo import plan_fields, plans_of, recall, remember
from tkbuild.store import Store


@pytest.fixture
def specs(tmp_path: Path) -> Path:
    (tmp_path / "specs/a").mkdir(parents=True)
    (tmp_path / "specs/a/one.yaml").write_text("spec: 1")
    return tmp_path / "specs"


def fields(specs: Path, store: Store, choice: Any = None, facts: BuildFacts = FACTS) -> dict[str, Any]:
    found = plan_fields(specs, choice or {"archs": ["sm_90a"]}, facts, store)
    assert found is not None
    return found


def test_what_changes_a_plan_changes_its_fields(specs: Path, tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    before = fields(specs, store)
    assert fields(specs, store) == before
    assert fields(specs, store, {"archs": []}) != before
    assert fields(specs, store, facts=BuildFacts({"tilelang": "other"}, {"cuda": "fake"})) != before
    assert fields(specs, store, facts=BuildFacts({"tilelang": "fake"}, {"cuda": "other"})) != before
    (specs / "a/helpers.py").write_text("")
    assert fields(specs, store) != before


def test_names_of_files_may_be_no_text(specs: Path, tmp_path: Path) -> None:
    (specs / os.fsdecode(b"\xff.txt")).write_text("")
    assert recall(Store(tmp_path / "store"), fields(specs, Store(tmp_path / "store"))) is None


def test_the_store_is_no_part_of_it(specs: Path) -> None:
    store = Store(specs / "artifacts")
    before = fields(specs, store)
    store.put("cubins", "0" * 64, fields={}, facts={}, files={"kernel.cubin": b"x"})
    assert fields(specs, store) == before


def test_files_that_cannot_be_read_are_left_to_the_planner(specs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path) -> str:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(memo, "file_digest", refuse)
    assert plan_fields(specs, {}, FACTS, Store(tmp_path / "store")) is None


def test_a_build_is_recalled_while_all_its_entries_are_there(specs: Path, tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    now = fields(specs, store)
    assert recall(store, now) is None
    for kind, digit in (("lowered", "1"), ("cubins", "2"), ("cubins", "3")):
        store.put(kind, digit * 64, fields={}, facts={}, files={"file": digit.encode()})
    remember(store, now, [("1" * 64, "2" * 64), ("1" * 64, "3" * 64)])
    assert recall(store, now) == 2
    store.gc(keep={"1" * 64, "2" * 64})
    assert recall(store, now) is None


def test_the_record_of_a_build_is_needed_as_long_as_its_entries_are(specs: Path, tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    for kind, digit in (("lowered", "1"), ("cubins", "2"), ("cubins", "3")):
        store.put(kind, digit * 64, fields={}, facts={}, files={"file": digit.encode()})
    remember(store, fields(specs, store, {"archs": ["sm_100a"]}), [("1" * 64, "3" * 64)])
    now = fields(specs, store)
    remember(store, now, [("1" * 64, "2" * 64)])
    needed = {"1" * 64, "2" * 64}
    store.gc(keep=needed | plans_of(store, needed))
    assert recall(store, now) == 1
    assert len(list(store.entries("plans"))) == 1

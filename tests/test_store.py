"""The store: races, crashes, damage, refusals and collection."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import random
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tkbuild import store as store_module
from tkbuild import workfolder
from tkbuild.digest import bytes_digest
from tkbuild.errors import ArgumentError, IntegrityError, StoreError
from tkbuild.store import Artifact, Store, StoreWarning

KEY = bytes_digest(b"key")
OTHER = bytes_digest(b"other")
FILES = {"kernel.cubin": b"\x7fELF" + bytes(range(256)) * 8, "plan.json": b'{"a": 1}\n'}
SPAWN = multiprocessing.get_context("spawn")


def put(store: Store, key: str = KEY, kind: str = "cubins") -> Artifact:
    return store.put(kind, key, fields={"arch": "sm_90a"}, facts={"variants": ["a-sm_90a"]}, files=FILES)


def test_round_trip_and_layout(tmp_path: Path) -> None:
    store = Store(tmp_path / "artifacts")
    assert store.get("cubins", KEY) is None
    before = os.umask(0o077)
    try:
        stored = put(store)
    finally:
        os.umask(before)
    assert store.get("cubins", KEY) == stored == Artifact("cubins", KEY, {"arch": "sm_90a"}, {"variants": ["a-sm_90a"]}, FILES)
    folder = tmp_path / "artifacts/cubins" / KEY[:2] / KEY
    assert sorted(path.name for path in folder.iterdir()) == ["kernel.cubin", "plan.json", "record.json"]
    assert folder.stat().st_mode & 0o777 == 0o755
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o644}
    assert store.get("lowered", KEY) is None
    assert list((tmp_path / "artifacts/tmp").iterdir()) == []


def test_record_golden(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.put("cubins", KEY, fields={"arch": "sm_90a"}, facts={}, files={"kernel.cubin": b"abc"})
    record = json.loads((tmp_path / "cubins" / KEY[:2] / KEY / "record.json").read_text())
    covering = record.pop("sha256")
    assert record == {
        "schema": 1,
        "kind": "cubins",
        "key": KEY,
        "fields": {"arch": "sm_90a"},
        "facts": {},
        "files": {"kernel.cubin": {"bytes": 3, "sha256": "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"}},
    }
    assert covering == bytes_digest(json.dumps(record, sort_keys=True, separators=(",", ":")).encode())


@pytest.mark.parametrize("bad", ["", "../x", KEY[:-1], KEY.upper(), KEY + "0"])
def test_keys_are_hex(tmp_path: Path, bad: str) -> None:
    with pytest.raises(ArgumentError):
        Store(tmp_path).get("cubins", bad)


@pytest.mark.parametrize("name", ["../x", "a/b", ".hidden", "record.json", "", "a b"])
def test_file_names_are_plain(tmp_path: Path, name: str) -> None:
    with pytest.raises(IntegrityError):
        Store(tmp_path).put("cubins", KEY, fields={}, facts={}, files={name: b""})
    assert list(Store(tmp_path).entries()) == []
    assert list((tmp_path / "tmp").iterdir()) == []


# ---- races and crashes (many ranks build one key on a share)


def _rank(root: str, barrier: Any, rounds: int, report: str, must_die: int) -> None:
    store, seen = Store(Path(root)), []
    for number in range(rounds):
        key = bytes_digest(f"round {number}".encode())
        barrier.wait()
        if number == must_die:
            # Die somewhere inside the write, as a killed rank does.
            signal.setitimer(signal.ITIMER_REAL, random.uniform(0.00005, 0.002))
            signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
            while True:
                store.put("lowered", bytes_digest(os.urandom(8)), fields={}, facts={}, files=FILES)
        built = store.put("cubins", key, fields={"round": number}, facts={"pid": os.getpid()}, files=FILES)
        loaded = store.get("cubins", key)
        seen.append((number, built.facts["pid"], None if loaded is None else loaded.facts["pid"]))
    Path(report).write_text(json.dumps(seen))


def test_ranks_that_build_the_same_keys_and_die(tmp_path: Path) -> None:
    rounds, ranks, mortal = 20, 8, 3
    # Barriers are of the survivors: a dead rank cannot arrive. Each mortal dies in a round of its own. Reports go through files: a
    # queue has a lock that a rank could take into its grave.
    reports = [tmp_path.parent / f"{tmp_path.name}-report-{rank}.json" for rank in range(ranks)]
    root = str(tmp_path)
    barrier = SPAWN.Barrier(ranks - mortal)
    lone = [SPAWN.Barrier(1) for _ in range(mortal)]
    survivors = [SPAWN.Process(target=_rank, args=(root, barrier, rounds, str(reports[i]), -1)) for i in range(ranks - mortal)]
    doomed = [SPAWN.Process(target=_rank, args=(root, lone[i], rounds, str(reports[-1 - i]), 3 * i)) for i in range(mortal)]
    for process in (*survivors, *doomed):
        process.start()
    for process in (*survivors, *doomed):
        process.join(60)
    assert [process.exitcode for process in survivors] == [0] * len(survivors)
    assert [process.exitcode for process in doomed] == [-signal.SIGKILL] * mortal
    seen = [row for report in reports[: len(survivors)] for row in json.loads(report.read_text())]
    assert len(seen) == rounds * len(survivors)
    for number in range(rounds):
        pids = {pid for this, *both in seen if this == number for pid in both}
        assert len(pids) == 1, "every rank gets the entry of the one winner"
    store = Store(tmp_path)
    put(store)
    assert list((tmp_path / "tmp").iterdir()) == [], "the next writer removes what the dead left"
    assert len(list(store.entries("cubins"))) == rounds + 1
    assert not (tmp_path / "quarantine").exists()


def test_nothing_left_by_hand_blocks(tmp_path: Path) -> None:
    for name in (".lock", "cubins.lock", f"cubins/{KEY[:2]}/{KEY}.lock", "tmp/lock"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (time.time() - 3 * 86400,) * 2)
    started = time.monotonic()
    put(Store(tmp_path))
    assert time.monotonic() - started < 5
    assert [entry.key for entry in Store(tmp_path).entries()] == [KEY]


def test_staging_of_the_living_and_of_other_hosts_stays(tmp_path: Path) -> None:
    mine = tmp_path / "tmp" / f"{workfolder.this_owner()}-{'a' * 16}"
    foreign, old = tmp_path / f"tmp/0123456789abcdef-1-1-{'a' * 16}", tmp_path / f"tmp/0123456789abcdef-2-2-{'a' * 16}"
    for path in (mine, foreign, old):
        path.mkdir(parents=True)
    os.utime(old, (0, 0))
    put(Store(tmp_path))
    assert sorted((tmp_path / "tmp").iterdir()) == sorted([mine, foreign])


def test_writer_whose_staging_is_swept_tries_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write, swept = store_module.write_entry, []

    def write_and_lose(folder: Path, artifact: Artifact) -> None:
        write(folder, artifact)
        if not swept:
            shutil.rmtree(folder)
            swept.append(folder)

    monkeypatch.setattr(store_module, "write_entry", write_and_lose)
    put(Store(tmp_path))
    assert swept
    assert Store(tmp_path).get("cubins", KEY) is not None


def test_loser_replaces_a_damaged_winner(tmp_path: Path) -> None:
    put(Store(tmp_path))
    (tmp_path / "cubins" / KEY[:2] / KEY / "kernel.cubin").write_bytes(b"")
    with pytest.warns(StoreWarning):
        put(Store(tmp_path))
    assert Store(tmp_path).get("cubins", KEY) is not None


def test_stale_handle_is_retried_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stored, read, raised = put(Store(tmp_path)), store_module.read_entry, []

    def stale_at_first(path: Path, kind: str, key: str) -> Artifact:
        if not raised:
            raised.append(path)
            raise OSError(errno.ESTALE, "Stale file handle")
        return read(path, kind, key)

    monkeypatch.setattr(store_module, "read_entry", stale_at_first)
    assert Store(tmp_path).get("cubins", KEY) == stored


# ---- damage


def _truncate(share: float) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        content = path.read_bytes()
        path.write_bytes(content[: int(share) if share >= 1 else int(len(content) * share)])

    return damage


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def _replace_by_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def _replace_by_dangling_link(path: Path) -> None:
    path.unlink()
    path.symlink_to("/nonexistent/target")


def _remove(path: Path) -> None:
    path.unlink()


DAMAGES = [_truncate(0), _truncate(1), _truncate(0.5), _flip, _replace_by_folder, _replace_by_dangling_link, _remove]


@pytest.mark.parametrize("name", [*FILES, "record.json"])
@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_a_miss_with_one_warning(tmp_path: Path, name: str, damage: Callable[[Path], None]) -> None:
    warnings: list[str] = []
    store = Store(tmp_path, warn=warnings.append)
    put(store)
    put(store, OTHER)
    damage(tmp_path / "cubins" / KEY[:2] / KEY / name)
    assert store.get("cubins", KEY) is None
    assert store.get("cubins", KEY) is None
    assert len(warnings) == 1
    assert str(tmp_path / "quarantine") in warnings[0]
    assert store.get("cubins", OTHER) is not None
    assert put(store).files == FILES
    assert store.get("cubins", KEY) is not None


@pytest.mark.parametrize(
    "replace", [lambda path: path.write_bytes(b"x"), lambda path: path.symlink_to("/nonexistent"), lambda path: path.mkdir()]
)
def test_something_else_in_the_place_of_an_entry(tmp_path: Path, replace: Callable[[Path], None]) -> None:
    warnings: list[str] = []
    store = Store(tmp_path, warn=warnings.append)
    place = tmp_path / "cubins" / KEY[:2] / KEY
    place.parent.mkdir(parents=True)
    replace(place)
    put(store)
    assert store.get("cubins", KEY) is not None
    assert len(warnings) <= 1


def test_entry_under_another_key_is_refused(tmp_path: Path) -> None:
    store = Store(tmp_path, warn=lambda text: None)
    put(store)
    (tmp_path / "cubins" / OTHER[:2]).mkdir(exist_ok=True)
    shutil.copytree(tmp_path / "cubins" / KEY[:2] / KEY, tmp_path / "cubins" / OTHER[:2] / OTHER)
    assert store.get("cubins", OTHER) is None


def test_planted_files_are_never_run_or_returned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    marker = tmp_path / "marker"
    store = Store(tmp_path / "artifacts")
    put(store)
    folder = tmp_path / "artifacts/cubins" / KEY[:2] / KEY
    evil = f"import pathlib; pathlib.Path({str(marker)!r}).touch()"
    for name in ("evil.py", "sitecustomize.py", "evil.pth", "evil.so", "__init__.py"):
        (folder / name).write_text(evil)
    pickled = b"cpathlib\nPath.touch\n(cpathlib\nPath\n(S'" + str(marker).encode() + b"'\ntRtR."
    (folder / "params.pkl").write_bytes(pickled)
    monkeypatch.chdir(folder)
    artifact = store.get("cubins", KEY)
    assert artifact is not None
    assert artifact.files == FILES
    assert len(list(store.entries())) == 1
    store.gc()
    assert not marker.exists()


# ---- refusals


def test_missing_store_is_empty(tmp_path: Path) -> None:
    store = Store(tmp_path / "nowhere")
    assert store.get("cubins", KEY) is None
    assert list(store.entries()) == []
    assert store.gc() == []
    store.clean()
    assert not (tmp_path / "nowhere").exists()


def test_store_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    store = Store(tmp_path / "file")
    with pytest.raises(StoreError, match=r"it is a file, expected a folder; give another folder with --store"):
        put(store)
    with pytest.raises(StoreError, match="it is a file"):
        store.get("cubins", KEY)
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize(
    ("number", "advice"),
    [(errno.EROFS, "--store"), (errno.EACCES, "--store"), (errno.ENOSPC, "tkbuild gc"), (errno.EDQUOT, "tkbuild gc")],
)
def test_unwritable_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, advice: str) -> None:
    def refuse(folder: Path, artifact: Artifact) -> None:
        (folder / "half").write_bytes(b"half")
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(store_module, "write_entry", refuse)
    with pytest.raises(StoreError, match=os.strerror(number)) as caught:
        put(Store(tmp_path))
    assert advice in caught.value.message
    assert str(tmp_path) in caught.value.message
    assert caught.value.errno == number
    assert list((tmp_path / "tmp").iterdir()) == []


def test_reading_writes_nothing(tmp_path: Path) -> None:
    put(Store(tmp_path))
    before = sorted((str(path), path.lstat().st_mtime_ns) for path in tmp_path.rglob("*"))
    Store(tmp_path).get("cubins", KEY)
    Store(tmp_path).get("cubins", OTHER)
    list(Store(tmp_path).entries())
    assert sorted((str(path), path.lstat().st_mtime_ns) for path in tmp_path.rglob("*")) == before


# ---- collection


def _aged_store(root: Path) -> tuple[Store, list[str]]:
    """Three entries, stored 300, 200 and 100 seconds before second 1000."""
    store, keys = Store(root), [bytes_digest(bytes([i])) for i in range(3)]
    for age, key in zip((300, 200, 100), keys, strict=True):
        put(store, key)
        os.utime(root / "cubins" / key[:2] / key, (1000 - age,) * 2)
    return store, keys


def test_gc_removes_what_is_not_kept(tmp_path: Path) -> None:
    store, keys = _aged_store(tmp_path)
    assert [entry.key for entry in store.gc(keep={keys[1]})] == [keys[0], keys[2]]
    assert [entry.key for entry in store.entries()] == [keys[1]]


def test_gc_by_age(tmp_path: Path) -> None:
    store, keys = _aged_store(tmp_path)
    assert [entry.key for entry in store.gc(older_than_s=150, keep={keys[0]}, now=1000)] == [keys[1]]


def test_gc_by_size_takes_the_oldest_first(tmp_path: Path) -> None:
    store, keys = _aged_store(tmp_path)
    one = next(iter(store.entries())).bytes
    assert [entry.key for entry in store.gc(max_bytes=2 * one, now=1000)] == [keys[0]]
    assert store.gc(max_bytes=2 * one, now=1000) == []


def test_files_of_others_stay(tmp_path: Path) -> None:
    store, keys = _aged_store(tmp_path)
    store.warn = lambda text: None
    (tmp_path / "cubins" / keys[0][:2] / keys[0] / "kernel.cubin").unlink()
    assert store.get("cubins", keys[0]) is None
    foreign = [
        tmp_path / name for name in ("README.md", "tmp/precious/a", "quarantine/cubins-mine/a", "cubins/mine/a", "lowered/a")
    ]
    for path in foreign:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("mine")
        os.utime(path.parent, (0, 0))
    own = tmp_path / f"tmp/0123456789abcdef-1-1-{'a' * 16}"
    own.mkdir()
    put(Store(tmp_path))
    store.gc()
    assert [path.name for path in (tmp_path / "quarantine").iterdir()] == ["cubins-mine"], "what was set aside is gone"
    put(Store(tmp_path))
    store.clean()
    assert sorted(path for path in tmp_path.rglob("*") if path.is_file()) == sorted(foreign)
    assert not own.exists()
    assert list(store.entries()) == []


def test_clean_leaves_nothing_of_its_own(tmp_path: Path) -> None:
    store, _ = _aged_store(tmp_path)
    (tmp_path / "cubins" / OTHER[:2]).mkdir(exist_ok=True)
    (tmp_path / "cubins" / OTHER[:2] / OTHER).write_text("a file in the place of an entry")
    store.clean()
    assert list(tmp_path.iterdir()) == []


def test_clean_of_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(StoreError, match="it is a file, expected a folder"):
        Store(tmp_path / "file").clean()
    assert (tmp_path / "file").read_text() == "mine"

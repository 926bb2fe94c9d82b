"""Stores behind fsspec: pull on a miss, push on a put, digests verified, failures survived."""

from __future__ import annotations

from pathlib import Path

import pytest

from tkbuild.digest import bytes_digest
from tkbuild.errors import StoreError
from tkbuild.remote_store import FsspecRemote, open_store
from tkbuild.store import Store

KEY = bytes_digest(b"key")
FILES = {"kernel.cubin": b"\x7fELF...", "plan.json": b"{}"}


def put(store: Store) -> None:
    store.put("cubins", KEY, fields={"a": 1}, facts={}, files=FILES)


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"file://{tmp_path}/shared"


def test_what_one_machine_builds_another_gets(tmp_path: Path, url: str) -> None:
    put(Store(tmp_path / "one", FsspecRemote(url)))
    second = Store(tmp_path / "two", FsspecRemote(url))
    artifact = second.get("cubins", KEY)
    assert artifact is not None
    assert artifact.files == FILES
    assert Store(tmp_path / "two").get("cubins", KEY) == artifact, "it is local now"
    assert second.get("cubins", bytes_digest(b"unknown")) is None


def test_memory_url(tmp_path: Path) -> None:
    put(Store(tmp_path / "one", FsspecRemote("memory://store")))
    assert Store(tmp_path / "two", FsspecRemote("memory://store")).get("cubins", KEY) is not None


@pytest.mark.parametrize("pattern", ["blobs/*", "cubins/*.json"])
def test_damage_is_a_miss_and_a_put_mends_it(tmp_path: Path, url: str, pattern: str) -> None:
    warnings: list[str] = []
    put(Store(tmp_path / "one", FsspecRemote(url)))
    for path in (tmp_path / "shared").glob(pattern):
        path.write_bytes(path.read_bytes()[:-3] + b"xyz")
    second = Store(tmp_path / "two", FsspecRemote(url, warn=warnings.append))
    assert second.get("cubins", KEY) is None
    assert second.get("cubins", KEY) is None
    assert len(warnings) == 1, "once is enough"
    assert "is damaged" in warnings[0]
    put(second)
    assert Store(tmp_path / "three", FsspecRemote(url)).get("cubins", KEY) is not None


def test_half_done_push_is_a_miss(tmp_path: Path, url: str) -> None:
    put(Store(tmp_path / "one", FsspecRemote(url)))
    next((tmp_path / "shared/blobs").iterdir()).unlink()
    assert Store(tmp_path / "two", FsspecRemote(url)).get("cubins", KEY) is None


def test_unreachable_store_is_reported_once_and_left_alone(tmp_path: Path) -> None:
    warnings: list[str] = []
    (tmp_path / "file").write_text("")
    store = Store(tmp_path / "one", FsspecRemote(f"file://{tmp_path}/file/below", warn=warnings.append))
    assert store.get("cubins", KEY) is None
    put(store)
    put(store)
    assert store.get("cubins", KEY) is not None
    assert len(warnings) == 1
    assert "out of reach" in warnings[0]


def test_a_sharing_store_uploads_what_it_has(tmp_path: Path, url: str) -> None:
    put(Store(tmp_path / "one"))
    assert Store(tmp_path / "one", FsspecRemote(url)).get("cubins", KEY) is not None
    assert Store(tmp_path / "two", FsspecRemote(url)).get("cubins", KEY) is None, "not asked to share"
    assert open_store(str(tmp_path / "one"), url, shares=True).get("cubins", KEY) is not None
    assert Store(tmp_path / "two", FsspecRemote(url)).get("cubins", KEY) is not None


def test_what_a_remote_has_is_not_uploaded_again(tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    put(Store(tmp_path / "one", FsspecRemote(url)))
    remote = FsspecRemote(url)
    monkeypatch.setattr(remote, "push", None)
    assert Store(tmp_path / "one", remote, shares=True).get("cubins", KEY) is not None


def test_sharing_with_a_store_out_of_reach_is_known(tmp_path: Path) -> None:
    put(Store(tmp_path / "one"))
    (tmp_path / "file").write_text("no folder")
    warnings: list[str] = []
    remote = FsspecRemote(f"file://{tmp_path}/file/store", warn=warnings.append)
    assert Store(tmp_path / "one", remote, shares=True).get("cubins", KEY) is not None
    assert remote.has_failed
    assert len(warnings) == 1


def test_unknown_protocol_is_an_error() -> None:
    with pytest.raises(StoreError, match="nosuchprotocol"):
        FsspecRemote("nosuchprotocol://bucket")


def test_open_store(tmp_path: Path, url: str) -> None:
    put(open_store(str(tmp_path / "one"), url))
    assert open_store(str(tmp_path / "two"), url).get("cubins", KEY) is not None
    assert open_store(str(tmp_path / "three")).get("cubins", KEY) is None
    with pytest.raises(StoreError, match="give a folder, and the URL as --remote"):
        open_store("s3://bucket/store")


@pytest.mark.parametrize("location", ["", " "])
def test_empty_store_is_refused(location: str) -> None:
    with pytest.raises(StoreError, match="names no folder: give one, or leave --store out"):
        open_store(location)


def test_empty_remote_is_none(tmp_path: Path) -> None:
    assert open_store(str(tmp_path), "").remote is None

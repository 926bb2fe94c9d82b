"""An artifact store behind an fsspec URL, shared by build machines; the door to fsspec."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tkbuild.digest import bytes_digest
from tkbuild.errors import IntegrityError, StoreError
from tkbuild.store import Artifact, Store, StoreWarning, check_content, make_record, parse_record


def open_store(location: str, remote: str | None = None, *, shares: bool = False) -> Store:
    """Return the store at the folder ``location``; with the URL ``remote``, what it lacks comes from there and goes there.

    shares: what it has and is asked for goes there as well. An empty ``remote`` is none.
    Raises: StoreError for nothing or a URL as location, a relative path as remote, or one that cannot be opened.
    """
    if not location.strip():
        raise StoreError(f"--store {location!r} names no folder: give one, or leave --store out", location=location)
    if "://" in location:
        raise StoreError(f"--store {location!r} is a URL: give a folder, and the URL as --remote", location=location)
    if remote and "://" not in remote and not Path(remote).is_absolute():
        raise StoreError(
            f"--remote {remote!r} is no URL: give one such as s3://bucket/folder or file:///folder, or the whole path of a folder",
            url=remote,
        )
    return Store(Path(location), FsspecRemote(remote) if remote else None, shares)


@dataclass
class FsspecRemote:
    """A store behind an fsspec URL (s3://, gs://, file://, memory://): blobs by digest, one record for each entry.

    A record is one object and names its blobs by digest, so writers cannot mix, and a half-done push is a miss.
    Not promised: that a push succeeds; a store that fails is reported once and left alone afterwards.
    """

    url: str
    warn: Callable[[str], None] = field(default=lambda text: warnings.warn(text, StoreWarning, stacklevel=3))
    _filesystem: Any = field(default=None, init=False)
    _base: str = field(default="", init=False)
    has_failed: bool = field(default=False, init=False)
    _known: dict[str, set[str]] = field(default_factory=dict, init=False)
    _damaged: set[str] = field(default_factory=set, init=False)

    def __post_init__(self) -> None:
        try:
            # Only here: importing fsspec takes a good part of the time in which an unchanged build is to end.
            fsspec = importlib.import_module("fsspec.core")
            self._filesystem, self._base = fsspec.url_to_fs(self.url)
        except (ValueError, ImportError) as exc:
            raise StoreError(f"--remote {self.url!r} cannot be opened: {exc}", url=self.url) from exc

    def pull(self, kind: str, key: str) -> Artifact | None:
        """Return a verified entry, or None if it is missing, damaged or out of reach."""
        if self.has_failed or f"{kind}/{key}" in self._damaged:
            return None
        try:
            record = parse_record(self._filesystem.cat_file(self._record_path(kind, key)), kind, key)
            files = {name: self._pull_blob(name, expected) for name, expected in record["files"].items()}
            return Artifact(kind, key, record["fields"], record["facts"], files)
        except FileNotFoundError:
            return None
        except IntegrityError as exc:
            self._damaged.add(f"{kind}/{key}")
            self.warn(f"{self.url}: {kind}/{key} is damaged ({exc}); it counts as missing")
        except Exception as exc:
            self._give_up(exc)
        return None

    def _pull_blob(self, name: str, expected: Mapping[str, Any]) -> bytes:
        content: bytes = self._filesystem.cat_file(f"{self._base}/blobs/{expected['sha256']}")
        check_content(name, content, expected)
        return content

    def push(self, artifact: Artifact) -> None:
        """Upload an entry: first its blobs, then its record."""
        if self.has_failed:
            return
        try:
            for content in artifact.files.values():
                self._upload(f"{self._base}/blobs/{bytes_digest(content)}", content)
            self._upload(self._record_path(artifact.kind, artifact.key), make_record(artifact))
        except Exception as exc:
            self._give_up(exc)

    def offer(self, artifact: Artifact) -> None:
        """Upload an entry unless there is a record of it; what is there is listed once for each kind."""
        if not self.has_failed and f"{artifact.key}.json" not in self._records(artifact.kind):
            self.push(artifact)

    def _records(self, kind: str) -> set[str]:
        if kind not in self._known:
            self._known[kind] = set()
            try:
                paths = self._filesystem.ls(f"{self._base}/{kind}", detail=False)
                self._known[kind] = {path.rpartition("/")[2] for path in paths}
            except FileNotFoundError:
                pass
            except Exception as exc:
                self._give_up(exc)
        return self._known[kind]

    def _upload(self, path: str, content: bytes) -> None:
        self._filesystem.makedirs(path.rpartition("/")[0], exist_ok=True)
        self._filesystem.pipe_file(path, content)

    def _record_path(self, kind: str, key: str) -> str:
        return f"{self._base}/{kind}/{key}.json"

    def _give_up(self, exc: Exception) -> None:
        self.has_failed = True
        self.warn(f"{self.url} is out of reach ({type(exc).__name__}: {exc}); the build goes on without it")

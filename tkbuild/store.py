"""Keep artifacts by key and return them verified; correct for any number of processes, without locks.

An entry is a folder with raw files and ``record.json``. It is written beside the entries and renamed whole, so a reader
sees all of it or nothing; who loses that race uses the winner's. Nothing read from a store is ever executed: a record is
JSON, and files that it does not list are not looked at.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import secrets
import shutil
import stat
import time
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from tkbuild.digest import bytes_digest, canonical_json
from tkbuild.errors import ArgumentError, IntegrityError, StoreError
from tkbuild.workfolder import owner_has_ended, this_owner

RECORD_SCHEMA = 1
KINDS = ("lowered", "cubins", "plans")
_RECORD = "record.json"
_KEY = re.compile(r"[0-9a-f]{64}")
_SHARD = re.compile(r"[0-9a-f]{2}")
_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
# The only names that a store makes, and so the only ones it removes: anything else in its folders is of someone else.
_STAGING = re.compile(r"[0-9a-f]{16}-[0-9]+-[0-9]+-[0-9a-f]{16}")
_QUARANTINED = re.compile(rf"({'|'.join(KINDS)})-{_KEY.pattern}-[0-9a-f]{{8}}")
_PUBLISH_ATTEMPTS = 5
# What a temporary folder of another host may be: after this time its writer is taken for dead.
_FOREIGN_STAGING_S = 24 * 3600.0
_GONE = {errno.ENOENT, errno.ESTALE}


class StoreWarning(UserWarning):
    """An entry was damaged and set aside, or a remote store did not answer; the build goes on."""


@dataclass(frozen=True)
class Artifact:
    """A verified entry. fields: what its key was made of.  facts: JSON that the writer added.  files: name to content."""

    kind: str
    key: str
    fields: Mapping[str, Any]
    facts: Mapping[str, Any]
    files: Mapping[str, bytes]


@dataclass(frozen=True)
class Entry:
    """What a listing tells of an entry, unverified: its place, size in bytes, and when it was stored (Unix seconds)."""

    kind: str
    key: str
    path: Path
    bytes: int
    stored_at: float


class Remote(Protocol):
    """A store elsewhere. ``pull`` answers verified contents or None, ``offer`` pushes what it lacks; none raises for an unreachable store."""

    has_failed: bool

    def pull(self, kind: str, key: str) -> Artifact | None: ...
    def push(self, artifact: Artifact) -> None: ...
    def offer(self, artifact: Artifact) -> None: ...


@dataclass
class Store:
    """The artifact store below ``root``. Threads and processes, also of several hosts, may use it at the same time.

    remote: asked for what ``root`` lacks, and given what is put.  shares: it is also given what is asked for and it lacks.
    warn: told about damage, once for each damaged entry.
    Not promised: that an entry put before a power cut of a remote file system survives it.
    """

    root: Path
    remote: Remote | None = None
    shares: bool = False
    warn: Callable[[str], None] = field(default=lambda text: warnings.warn(text, StoreWarning, stacklevel=3))
    _has_swept: bool = field(default=False, init=False)

    def get(self, kind: str, key: str) -> Artifact | None:
        """Return the entry, every byte verified, or None. A damaged entry is moved to ``quarantine/`` and is a miss.

        Raises: StoreError if the store cannot be read at all.
        """
        artifact = self._get_local(kind, key)
        if artifact is None and self.remote is not None:
            artifact = self.remote.pull(kind, key)
            if artifact is not None:
                self._write(artifact)
        elif artifact is not None and self.remote is not None and self.shares:
            self.remote.offer(artifact)
        return artifact

    def _get_local(self, kind: str, key: str) -> Artifact | None:
        path = self._path(kind, key)
        for _ in range(2):  # a network file system may answer "stale handle" once
            try:
                return read_entry(path, kind, key)
            except FileNotFoundError:
                return None
            except IntegrityError as exc:
                self._quarantine(path, str(exc))
                return None
            except OSError as exc:
                problem = exc
                if exc.errno != errno.ESTALE:
                    break
        raise _store_error(self.root, "read", problem) from problem

    def put(
        self, kind: str, key: str, *, fields: Mapping[str, Any], facts: Mapping[str, Any], files: Mapping[str, bytes]
    ) -> Artifact:
        """Publish an entry and return it, or the equal entry that another writer published first.

        Raises: StoreError for a store that is read-only, full or no folder; ArgumentError for names that are no file names.
        """
        artifact = self._write(Artifact(kind, key, fields, facts, files))
        if self.remote is not None:
            self.remote.push(artifact)
        return artifact

    def _write(self, artifact: Artifact) -> Artifact:
        try:
            self._sweep_once()
            for _ in range(_PUBLISH_ATTEMPTS):
                if self._publish(artifact):
                    return artifact
                winner = self._get_local(artifact.kind, artifact.key)
                if winner is not None:
                    return winner
        except OSError as exc:
            raise _store_error(self.root, "write", exc) from exc
        raise StoreError(
            f"{self.root}: {artifact.kind}/{artifact.key} could not be published in {_PUBLISH_ATTEMPTS} attempts",
            root=str(self.root),
        )

    def _publish(self, artifact: Artifact) -> bool:
        """Write the entry beside the others and rename it into its place; False if something is there already."""
        target = self._path(artifact.kind, artifact.key)
        staging = self.root / "tmp" / f"{this_owner()}-{secrets.token_hex(8)}"
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            staging.mkdir(parents=True)
            write_entry(staging, artifact)
            staging.rename(target)
            _sync_folder(target.parent)
        except OSError as exc:
            occupied = exc.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR, errno.EISDIR) and os.path.lexists(target)
            if occupied or exc.errno in _GONE:  # another process published, or swept the staging folder
                return False
            raise
        finally:
            shutil.rmtree(staging, ignore_errors=True)
        return True

    def _quarantine(self, path: Path, problem: str) -> None:
        aside = self.root / "quarantine" / f"{path.parent.parent.name}-{path.name}-{secrets.token_hex(4)}"
        try:
            aside.parent.mkdir(exist_ok=True)
            path.rename(aside)
            self.warn(f"{path} is damaged ({problem}); it was moved to {aside} and counts as missing")
        except FileNotFoundError:
            pass  # another process was faster
        except OSError as exc:
            self.warn(f"{path} is damaged ({problem}) and cannot be moved away ({exc.strerror}); it counts as missing")

    def _path(self, kind: str, key: str) -> Path:
        if kind not in KINDS or not _KEY.fullmatch(key):
            raise ArgumentError(
                f"no store entry {kind}/{key}: expected one of {', '.join(KINDS)} and 64 hex digits", kind=kind, key=key
            )
        return self.root / kind / key[:2] / key

    def _sweep_once(self) -> None:
        """Remove what writers left behind that were killed."""
        if self._has_swept:
            return
        self._has_swept = True
        for path in _children(self.root / "tmp"):
            if _STAGING.fullmatch(path.name) and _is_abandoned(path):
                _delete(path)

    def entries(self, kind: str | None = None) -> Iterator[Entry]:
        """List entries in order of kind and key; damage is not looked for."""
        for one in KINDS if kind is None else (kind,):
            for shard in _children(self.root / one):
                for path in _children(shard):
                    if _KEY.fullmatch(path.name) and path.is_dir():
                        with contextlib.suppress(FileNotFoundError):  # removed meanwhile
                            yield _entry(one, path)

    def gc(
        self,
        *,
        keep: Collection[str] = (),
        older_than_s: float | None = None,
        max_bytes: int | None = None,
        now: float | None = None,
    ) -> list[Entry]:
        """Remove entries, the oldest first, and return them; also empty the quarantine and abandoned staging folders.

        keep: keys that stay in any case.  older_than_s: remove entries stored longer ago.  max_bytes: remove until the
        rest, kept ones included, is no larger. Without both, everything that is not in ``keep`` goes.
        Raises: StoreError if ``root`` is no folder, or an entry cannot be removed.
        """
        if self.root.exists() and not self.root.is_dir():
            raise _store_error(self.root, "empty", NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR)))
        now = time.time() if now is None else now
        everything = sorted(self.entries(), key=lambda entry: (entry.stored_at, entry.key))
        total = sum(entry.bytes for entry in everything)
        removed: list[Entry] = []
        for entry in everything:
            is_old = older_than_s is not None and now - entry.stored_at > older_than_s
            is_surplus = max_bytes is not None and total > max_bytes
            if entry.key not in keep and (is_old or is_surplus or (older_than_s is None and max_bytes is None)):
                self._remove(entry.path)
                removed.append(entry)
                total -= entry.bytes
        self._has_swept = False
        self._sweep_once()
        _delete_named(self.root / "quarantine", _QUARANTINED)
        return removed

    def _remove(self, path: Path) -> None:
        """Take an entry out of sight at once, then delete it, so that no reader finds half of it."""
        doomed = self.root / "tmp" / f"{this_owner()}-{secrets.token_hex(8)}"
        try:
            doomed.parent.mkdir(exist_ok=True)
            path.rename(doomed)
        except FileNotFoundError:
            return
        except OSError as exc:
            raise _store_error(self.root, "write", exc) from exc
        _delete(doomed)

    def clean(self) -> None:
        """Remove every entry and all that belongs to the store, but no file of someone else."""
        self.gc()
        for kind in KINDS:
            for shard in _children(self.root / kind):
                if _SHARD.fullmatch(shard.name):
                    _delete_named(shard, _KEY)
            _remove_if_empty(self.root / kind)
        _delete_named(self.root / "tmp", _STAGING)


def write_entry(folder: Path, artifact: Artifact) -> None:
    """Write an artifact's files and record into an empty ``folder``, durable and readable by everyone."""
    for name in artifact.files:
        _check_file_name(name)
    contents = {**artifact.files, _RECORD: make_record(artifact)}
    for name, content in contents.items():
        with (folder / name).open("xb") as file:
            file.write(content)
            file.flush()
            os.fchmod(file.fileno(), 0o644)
            os.fsync(file.fileno())
    folder.chmod(0o755)
    _sync_folder(folder)


def make_record(artifact: Artifact) -> bytes:
    """Return the record of an artifact as JSON; its last field covers all the others."""
    record: dict[str, Any] = {
        "schema": RECORD_SCHEMA,
        "kind": artifact.kind,
        "key": artifact.key,
        "fields": dict(artifact.fields),
        "facts": dict(artifact.facts),
        "files": {name: {"sha256": bytes_digest(content), "bytes": len(content)} for name, content in artifact.files.items()},
    }
    record["sha256"] = bytes_digest(canonical_json(record))
    return json.dumps(record, sort_keys=True, indent=1, allow_nan=False).encode() + b"\n"


def parse_record(content: bytes, kind: str, key: str) -> dict[str, Any]:
    """Return a record after checking its digest and that it is of this entry. Raises: IntegrityError."""
    try:
        record = json.loads(content)
        claimed = record.pop("sha256")
    except (ValueError, KeyError, AttributeError, TypeError) as exc:
        raise IntegrityError(f"record.json is no record: {exc}") from exc
    if record.get("schema") != RECORD_SCHEMA:
        raise IntegrityError(f"record.json has schema {record.get('schema')!r}, expected {RECORD_SCHEMA}")
    if claimed != bytes_digest(canonical_json(record)):
        raise IntegrityError("record.json does not have the digest it claims")
    if (record["kind"], record["key"]) != (kind, key):
        raise IntegrityError(f"record.json is of {record['kind']}/{record['key']}")
    for name in record["files"]:
        _check_file_name(name)
    return record  # type: ignore[no-any-return]


def check_content(name: str, content: bytes, expected: Mapping[str, Any]) -> None:
    """Compare a file with its line in the record. Raises: IntegrityError naming both digests."""
    found = bytes_digest(content)
    if len(content) != expected["bytes"] or found != expected["sha256"]:
        raise IntegrityError(
            f"{name} has {len(content)} bytes and sha256 {found[:12]}.., "
            f"recorded are {expected['bytes']} bytes and {expected['sha256'][:12]}..",
            file=name,
        )


def read_entry(path: Path, kind: str, key: str) -> Artifact:
    """Return the entry at ``path``, every byte verified.

    Raises: FileNotFoundError if there is none, IntegrityError if it is damaged, OSError if it cannot be read.
    """
    if not stat.S_ISDIR(path.lstat().st_mode):
        raise IntegrityError("the entry is no folder")
    record = parse_record(_read_file(path / _RECORD), kind, key)
    files = {}
    for name, expected in record["files"].items():
        files[name] = _read_file(path / name)
        check_content(name, files[name], expected)
    return Artifact(kind, key, record["fields"], record["facts"], files)


def _read_file(path: Path) -> bytes:
    """Read a regular file of an entry; links and folders are damage, and so is a file missing from an entry that stays."""
    try:
        if not stat.S_ISREG(path.lstat().st_mode):
            raise IntegrityError(f"{path.name} is no regular file")
        return path.read_bytes()
    except FileNotFoundError:
        if path.parent.exists():
            raise IntegrityError(f"{path.name} is missing") from None
        raise  # the whole entry was removed meanwhile


def _check_file_name(name: str) -> None:
    if not _FILE_NAME.fullmatch(name) or name == _RECORD:
        raise IntegrityError(f"{name!r} is no name for a file of an entry", file=name)


def _entry(kind: str, path: Path) -> Entry:
    size = sum(child.lstat().st_size for child in path.iterdir())
    return Entry(kind, path.name, path, size, path.stat().st_mtime)


def _children(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []


def _delete(path: Path) -> None:
    """Delete a folder with all in it, or a file or link in the place of one, as far as that is allowed."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink()


def _delete_named(folder: Path, name: re.Pattern[str]) -> None:
    """Delete what is called so in ``folder``, and then the folder if nothing else is in it."""
    for path in _children(folder):
        if name.fullmatch(path.name):
            _delete(path)
    _remove_if_empty(folder)


def _remove_if_empty(folder: Path) -> None:
    with contextlib.suppress(OSError):
        folder.rmdir()


def _is_abandoned(path: Path) -> bool:
    has_ended = owner_has_ended(path.name)
    if has_ended is not None:
        return has_ended
    with contextlib.suppress(FileNotFoundError):
        return time.time() - path.lstat().st_mtime > _FOREIGN_STAGING_S
    return False


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as exc:
        if exc.errno != errno.EINVAL:  # some file systems cannot sync a folder
            raise
    finally:
        os.close(descriptor)


def _store_error(root: Path, verb: str, exc: OSError) -> StoreError:
    reason, advice = exc.strerror or str(exc), "give another folder with --store"
    if exc.errno in (errno.ENOSPC, errno.EDQUOT):
        advice = "make room with `tkbuild gc`, or give another folder with --store"
    elif exc.errno in (errno.ENOTDIR, errno.EEXIST) and root.exists() and not root.is_dir():
        reason = "it is a file, expected a folder"
    return StoreError(f"cannot {verb} the artifact store {root}: {reason}; {advice}", root=str(root), errno=exc.errno)

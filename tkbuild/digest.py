"""sha256 over labelled, length-framed fields, over files, and over the content of installed packages."""

from __future__ import annotations

import base64
import csv
import hashlib
import importlib.metadata
import json
import os
import struct
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tkbuild.errors import ArgumentError, IntegrityError

_CHUNK_BYTES = 1 << 20
# What the installer adds, or what names the machine: no part of a package's content.
_INSTALLER_FILES = {"RECORD", "INSTALLER", "REQUESTED", "direct_url.json", "uv_cache.json"}


def canonical_json(value: object) -> bytes:
    """Return ``value`` as JSON with sorted keys, no blanks, UTF-8.

    Raises: ArgumentError for what JSON cannot say exactly: NaN, infinities, keys that are no strings, other types.
    """
    _refuse_inexact(value)
    try:
        text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
        return text.encode()
    except (TypeError, ValueError) as exc:
        raise ArgumentError(f"cannot be written as canonical JSON: {exc}") from exc


def _refuse_inexact(value: object) -> None:
    if isinstance(value, Mapping):
        for key, item in value.items():
            if not isinstance(key, str):
                raise ArgumentError(f"JSON key {key!r} is a {type(key).__name__}, expected a string")
            _refuse_inexact(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            _refuse_inexact(item)


def bytes_digest(content: bytes) -> str:
    """Return the sha256 of ``content`` in hex."""
    return hashlib.sha256(content).hexdigest()


def file_digest(path: Path) -> str:
    """Return the sha256 of a file's content in hex."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def key_digest(schema: int, fields: Mapping[str, Any]) -> str:
    """Return the key of ``fields``: labels and canonical JSON values, each with its length in front.

    schema: the version of the meaning of the fields; it comes first.  The order of ``fields`` does not matter.
    """
    digest = hashlib.sha256(f"tkbuild key {schema}\n".encode())
    for label in sorted(fields):
        _frame(digest, label.encode())
        _frame(digest, canonical_json(fields[label]))
    return digest.hexdigest()


def _frame(digest: hashlib._Hash, content: bytes) -> None:
    digest.update(struct.pack("<Q", len(content)))
    digest.update(content)


def files_digest(root: Path, names: Iterable[str]) -> str:
    """Return the digest of files below ``root`` by relative name and content; times, modes and root do not matter."""
    return key_digest(1, {name: file_digest(root / name) for name in names})


def package_digest(distribution: importlib.metadata.Distribution, under: Sequence[str] = ("",)) -> str:
    """Return the digest of an installed package's files whose recorded path starts with one of ``under``.

    The sha256 of each file comes from the package's RECORD. Files that were changed after the installation (another
    size, or newer than RECORD) are read instead, so that an edit in place is seen; times decide only what is read.
    Raises: IntegrityError for a package without RECORD, with missing files, or installed as editable: it has no content to name.
    """
    return entries_digest(package_entries(distribution), under)


def entries_digest(entries: Iterable[tuple[str, str]], under: Sequence[str] = ("",)) -> str:
    """Return the digest of those entries of a package whose path starts with one of ``under``."""
    prefixes = tuple(under)
    digest = hashlib.sha256(b"tkbuild package 1\n")
    # One update for all files: framing thousands of them one by one takes longer than reading them.
    lines = (f"{len(path)}:{path}:{recorded}\n" for path, recorded in sorted(entries) if path.startswith(prefixes))
    digest.update("".join(lines).encode())
    return digest.hexdigest()


def package_entries(distribution: importlib.metadata.Distribution) -> list[tuple[str, str]]:
    """Return (path, sha256 as RECORD writes it) of every file of an installed package. Raises: as ``package_digest``."""
    root = str(distribution.locate_file("")).rstrip("/")
    record = distribution.read_text("RECORD")
    name = distribution.metadata["Name"]
    if record is None:
        raise IntegrityError(f"{name} has no RECORD: its content cannot be named; install it from a wheel", package=name)
    if '"editable": true' in (distribution.read_text("direct_url.json") or ""):
        raise IntegrityError(f"{name} is installed as editable: its content cannot be named; install it from a wheel", package=name)
    rows = list(csv.reader(record.splitlines()))
    recorded_at = Path(root, next(row[0] for row in rows if row[0].endswith(".dist-info/RECORD"))).stat().st_mtime
    return [
        (path, _file_entry(f"{root}/{path}", digest, size, recorded_at)) for path, digest, size in rows if _is_content(path, digest)
    ]


def damaged_files(distribution: importlib.metadata.Distribution) -> list[str]:
    """Return those files of an installed package that are missing, or not what its RECORD says; every byte is read."""
    rows = [row for row in csv.reader((distribution.read_text("RECORD") or "").splitlines()) if len(row) == 3]
    damaged = [] if any(path.endswith(".dist-info/RECORD") for path, *_ in rows) else ["RECORD"]
    for path, recorded, _ in rows:
        file = Path(str(distribution.locate_file(path)))
        if _is_content(path, recorded) and not (file.is_file() and _recorded_form(file) == recorded):
            damaged.append(path)
    return damaged


def _is_content(path: str, digest: str) -> bool:
    is_script = path.startswith(("..", "/"))  # holds the path of the interpreter
    return bool(digest) and not is_script and path.rsplit("/", 1)[-1] not in _INSTALLER_FILES and not path.endswith(".pyc")


def _file_entry(path: str, recorded: str, size: str, recorded_at: float) -> str:
    if not recorded.startswith("sha256="):
        raise IntegrityError(f"RECORD uses {recorded.partition('=')[0]}, expected sha256", path=path)
    try:
        status = os.stat(path)  # noqa: PTH116 - of thousands of files; a Path for each takes longer than the rest
    except OSError as exc:
        raise IntegrityError(f"{path} was installed and is missing now; install its package again", path=path) from exc
    if str(status.st_size) != size or status.st_mtime > recorded_at:
        return _recorded_form(Path(path))
    return recorded


def _recorded_form(path: Path) -> str:
    """Return the digest of a file as RECORD writes it."""
    return "sha256=" + base64.urlsafe_b64encode(bytes.fromhex(file_digest(path))).rstrip(b"=").decode()

"""Digests: framing, canonical JSON, and the content of installed packages."""

from __future__ import annotations

import base64
import hashlib
import importlib.metadata
import os
import shutil
from pathlib import Path

import pytest

from tkbuild.digest import bytes_digest, canonical_json, file_digest, files_digest, key_digest, package_digest
from tkbuild.errors import ArgumentError, IntegrityError


def test_canonical_json_has_one_form() -> None:
    assert canonical_json({"b": [1, "é"], "a": None}) == '{"a":null,"b":[1,"é"]}'.encode()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), {1: 2}, {"a": {None: 1}}, [{2: 1}], b"x", {1, 2}, Path("x")])
def test_canonical_json_refuses_what_json_cannot_say(value: object) -> None:
    with pytest.raises(ArgumentError):
        canonical_json(value)


def test_key_is_independent_of_order_and_bound_to_schema() -> None:
    assert key_digest(1, {"a": 1, "b": 2}) == key_digest(1, {"b": 2, "a": 1})
    assert key_digest(1, {"a": 1}) != key_digest(2, {"a": 1})


def test_key_fields_cannot_run_into_each_other() -> None:
    keys = [
        key_digest(1, fields)
        for fields in (
            {"a": "bc"},
            {"ab": "c"},
            {"a": "b", "c": ""},
            {"a": 1},
            {"a": "1"},
            {"a": True},
            {"a": [1]},
            {"a": None},
            {},
        )
    ]
    assert len(set(keys)) == len(keys)


def test_key_golden() -> None:
    framed = b"tkbuild key 1\n" + (1).to_bytes(8, "little") + b"a" + (3).to_bytes(8, "little") + b'"b"'
    assert key_digest(1, {"a": "b"}) == hashlib.sha256(framed).hexdigest()


def test_files_digest_sees_names_and_content_only(tmp_path: Path) -> None:
    for root in ("one", "two"):
        (tmp_path / root).mkdir()
        (tmp_path / root / "a").write_bytes(b"1")
        (tmp_path / root / "b").write_bytes(b"2")
    os.utime(tmp_path / "two/a", (0, 0))
    (tmp_path / "two/b").chmod(0o600)
    before = files_digest(tmp_path / "one", ["a", "b"])
    assert files_digest(tmp_path / "two", ["b", "a"]) == before
    (tmp_path / "two/a").write_bytes(b"2")
    (tmp_path / "two/b").write_bytes(b"1")
    assert files_digest(tmp_path / "two", ["a", "b"]) != before
    assert file_digest(tmp_path / "one/a") == bytes_digest(b"1")


def install(site: Path, files: dict[str, bytes], *, direct_url: str = "") -> importlib.metadata.Distribution:
    """Lay out a package as pip does."""
    info = site / "thing-1.0.dist-info"
    info.mkdir(parents=True)
    rows = []
    for path, content in files.items():
        target = site / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content)
        digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
        rows.append(f"{path},sha256={digest},{len(content)}")
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: thing\nVersion: 1.0\n")
    if direct_url:
        (info / "direct_url.json").write_text(direct_url)
    rows += ["thing-1.0.dist-info/INSTALLER,sha256=AAAA,4", "thing/__pycache__/a.pyc,,", "thing-1.0.dist-info/RECORD,,"]
    (info / "RECORD").write_text("\n".join(rows) + "\n")
    return importlib.metadata.PathDistribution(info)


FILES = {"thing/a.py": b"x = 1\n", "thing/inc/a.h": b"#define A 1\n"}


def test_package_digest_is_the_same_wherever_and_however_it_was_installed(tmp_path: Path) -> None:
    first = package_digest(install(tmp_path / "one", FILES))
    second = install(tmp_path / "two/deeper", dict(reversed(FILES.items())))
    os.utime(tmp_path / "two/deeper/thing/a.py", (2**31, 2**31))  # newer than RECORD: read, and found equal
    assert package_digest(second) == first
    shutil.move(tmp_path / "one", tmp_path / "moved")
    assert package_digest(importlib.metadata.PathDistribution(tmp_path / "moved/thing-1.0.dist-info")) == first


def test_package_digest_follows_an_edit_in_place(tmp_path: Path) -> None:
    package = install(tmp_path, FILES)
    before, headers = package_digest(package), package_digest(package, ["thing/inc/"])
    (tmp_path / "thing/a.py").write_bytes(b"x = 2\n")  # the same size
    os.utime(tmp_path / "thing/a.py", (2**31, 2**31))
    assert package_digest(package) != before
    assert package_digest(package, ["thing/inc/"]) == headers
    (tmp_path / "thing/inc/a.h").write_bytes(b"#define A 10\n")
    os.utime(tmp_path / "thing/inc/a.h", (0, 0))  # older than RECORD, but of another size
    assert package_digest(package, ["thing/inc/"]) != headers


def test_package_without_nameable_content_is_refused(tmp_path: Path) -> None:
    editable = install(tmp_path / "e", FILES, direct_url='{"dir_info": {"editable": true}, "url": "file:///x"}')
    with pytest.raises(IntegrityError, match="editable"):
        package_digest(editable)
    bare = install(tmp_path / "b", FILES)
    (tmp_path / "b/thing-1.0.dist-info/RECORD").unlink()
    with pytest.raises(IntegrityError, match="no RECORD"):
        package_digest(bare)
    holed = install(tmp_path / "h", FILES)
    (tmp_path / "h/thing/a.py").unlink()
    with pytest.raises(IntegrityError, match="missing now"):
        package_digest(holed)

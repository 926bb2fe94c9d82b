"""Manifests: every malformed one is an integrity error that says what to do."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from runtime.providers import cast_signature, write_json, write_provider

from tkbuild import manifest
from tkbuild.errors import IntegrityError
from tkbuild.manifest import MANIFEST_NAME, Manifest, content_id
from tkbuild.runtime.registry import read_manifest


@pytest.fixture
def provider(tmp_path: Path) -> Path:
    return write_provider(tmp_path / "kernels", cast_signature())


def test_own_json_reads_back(provider: Path) -> None:
    value = json.loads((provider / MANIFEST_NAME).read_text())
    assert Manifest.from_json(value).to_json() == value


@pytest.mark.parametrize(
    "spelled",
    [lambda value: json.dumps(value, sort_keys=True, separators=(",", ":")) + "\n", lambda value: json.dumps(value, indent=1)],
)
def test_identity_does_not_depend_on_the_spelling(provider: Path, spelled: Callable[[Any], str]) -> None:
    value = json.loads((provider / MANIFEST_NAME).read_text())
    assert Manifest.from_text(spelled(value)).to_json() == value
    with pytest.raises(IntegrityError, match="changed after it was written"):
        Manifest.from_text(spelled({**value, "version": "9.9"}))


def test_identity_of_a_canonical_text_is_read_off(provider: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    value = json.loads((provider / MANIFEST_NAME).read_text())
    monkeypatch.setattr(manifest, "content_id", None)
    Manifest.from_text(json.dumps(value, sort_keys=True, separators=(",", ":")) + "\n")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("runtime_abi", "x"),
        ("runtime_abi", None),
        ("runtime_abi", True),
        ("toolchain", []),
        ("toolchain", {"cuda": 13}),
        ("arch", "sm_90q"),
        ("arch", 90),
        ("variants", {}),
        ("kernels", []),
        ("files", None),
        ("files", {"a.cubin": "digest"}),
    ],
)
def test_wrong_types_are_refused_with_path_and_next_step(provider: Path, field: str, value: Any) -> None:
    path = reseal(provider, lambda manifest: manifest.update({field: value}))
    check_refused(path)


@pytest.mark.parametrize(
    ("field", "value"),
    [("verified", None), ("verified", {}), ("axes", []), ("axes", {"block": 1.5}), ("plan", None), ("resources", []), ("id", 3)],
)
def test_wrong_types_in_a_variant(provider: Path, field: str, value: Any) -> None:
    path = reseal(provider, lambda manifest: manifest["variants"][0].update({field: value}))
    check_refused(path)


@pytest.mark.parametrize("content", [b"\xff\xfe", b"[" * 200_000, b"[]", b"", b'{"schema": 1}'])
def test_bytes_that_are_no_manifest(provider: Path, content: bytes) -> None:
    (provider / MANIFEST_NAME).write_bytes(content)
    check_refused(provider / MANIFEST_NAME)


def reseal(provider: Path, change: Any) -> Path:
    path = provider / MANIFEST_NAME
    value = json.loads(path.read_text())
    change(value)
    write_json(path, {**value, "content_id": content_id(value)})
    return path


def check_refused(path: Path) -> None:
    with pytest.raises(IntegrityError) as caught:
        read_manifest(path.parent)
    assert caught.value.path == str(path)
    assert caught.value.message.startswith(f"{path}: ")
    assert "; reinstall the kernel wheel: pip install --no-deps" in caught.value.message

"""The registry: what counts as installed, and what is refused before anything is loaded."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from runtime.providers import cast_signature, write_json, write_provider

from tkbuild.errors import IntegrityError, PackageError
from tkbuild.manifest import MANIFEST_NAME, RUNTIME_ABI, content_id
from tkbuild.runtime.registry import read_registry
from tkbuild.signature import ScalarSpec


@pytest.fixture
def provider(tmp_path: Path) -> Path:
    return write_provider(tmp_path / "kernels", cast_signature())


def edit(root: Path, change: Callable[[dict[str, Any]], None], *, seal: bool) -> None:
    value = json.loads((root / MANIFEST_NAME).read_text())
    change(value)
    if seal:
        value["content_id"] = content_id(value)
    write_json(root / MANIFEST_NAME, value)


def test_reads_back_what_was_written(provider: Path) -> None:
    registry = read_registry([provider])
    assert registry.signatures["quant.cast"] == cast_signature()
    assert len(registry.all_variants()) == 8
    assert registry.all_variants()[0].cubin().endswith(b"quant.cast-bfloat16-32-256-sm_90a")


def test_changed_op_table_is_noticed(provider: Path) -> None:
    edit(provider, lambda m: m["variants"][0].update(id="other"), seal=False)
    with pytest.raises(IntegrityError, match="changed after it was written"):
        read_registry([provider])


def test_manifest_of_another_folder_is_noticed_at_load(provider: Path, tmp_path: Path) -> None:
    other = write_provider(tmp_path / "other", cast_signature(), "sm_100a")
    (provider / MANIFEST_NAME).write_bytes((other / MANIFEST_NAME).read_bytes())
    with pytest.raises(IntegrityError, match="reinstall"):
        read_registry([provider]).all_variants()[0].cubin()


def test_swapped_cubins_are_refused(provider: Path) -> None:
    first, second = (variant.root / variant.record.cubin for variant in read_registry([provider]).all_variants()[:2])
    a, b = first.read_bytes(), second.read_bytes()
    first.write_bytes(b)
    second.write_bytes(a)
    with pytest.raises(IntegrityError, match="sha256"):
        read_registry([provider]).all_variants()[0].cubin()


@pytest.mark.parametrize("damage", ["missing", "empty", "one byte", "flipped", "folder", "dangling"])
def test_damaged_cubin_is_an_error_of_that_variant_only(provider: Path, damage: str) -> None:
    broken, intact = read_registry([provider]).all_variants()[:2]
    path = broken.root / broken.record.cubin
    content = path.read_bytes()
    path.unlink()
    if damage == "folder":
        path.mkdir()
    elif damage == "dangling":
        path.symlink_to(provider / "nowhere")
    elif damage != "missing":
        path.write_bytes({"empty": b"", "one byte": content[:1], "flipped": content[:-1] + bytes([content[-1] ^ 1])}[damage])
    with pytest.raises(IntegrityError, match=path.name):
        broken.cubin()
    assert intact.cubin()


@pytest.mark.parametrize(("field", "value"), [("schema", 2), ("schema", None)])
def test_other_schema_is_refused(provider: Path, field: str, value: object) -> None:
    edit(provider, lambda m: m.update({field: value}), seal=True)
    with pytest.raises(IntegrityError, match="schema"):
        read_registry([provider])


@pytest.mark.parametrize(
    ("abi", "upgrade"), [(RUNTIME_ABI + 1, "a newer tkbuild: pip"), (RUNTIME_ABI - 1, "a newer tkbuild-kernels-sm90a: pip")]
)
def test_other_abi_says_which_to_upgrade(provider: Path, abi: int, upgrade: str) -> None:
    edit(provider, lambda m: m.update(runtime_abi=abi, kernels="in another form"), seal=True)
    with pytest.raises(PackageError, match=upgrade):
        read_registry([provider])


def test_cubin_name_cannot_leave_the_folder(provider: Path) -> None:
    edit(provider, lambda m: m["variants"][0].update(cubin="../secret"), seal=True)
    with pytest.raises(IntegrityError, match="not among"):
        read_registry([provider])


def test_truncated_manifest(provider: Path) -> None:
    (provider / MANIFEST_NAME).write_text("{")
    with pytest.raises(IntegrityError, match="reinstall the kernel wheel"):
        read_registry([provider])


def test_planted_code_is_never_run(provider: Path, tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    for name in ("__init__.py", "sitecustomize.py", "kernel.py", "evil.pth"):
        (provider / name).write_text(f"open({str(marker)!r}, 'w').close()\n")
    (provider / "params.pkl").write_bytes(b"cos\nsystem\n(S'touch " + str(marker).encode() + b"'\ntR.")
    read_registry([provider]).all_variants()[0].cubin()
    assert not marker.exists()


def test_first_provider_wins(provider: Path, tmp_path: Path) -> None:
    second = write_provider(tmp_path / "second", cast_signature())
    found = read_registry([provider, second])
    assert {variant.root for variant in found.all_variants()} == {provider}
    assert (found.clashes, found.shadowed) == ({}, {})


def test_other_code_under_the_same_ids_is_told(provider: Path, tmp_path: Path) -> None:
    second = write_provider(tmp_path / "second", cast_signature(), code=b"other", name="other-sm90a")
    found = read_registry([provider, second])
    assert {variant.wheel for variant in found.all_variants()} == {"tkbuild-kernels-sm90a"}
    (text,) = found.shadowed.values()
    assert f"quant.cast: other-sm90a ({second}) has other code than tkbuild-kernels-sm90a ({provider})" in text


def test_another_signature_concerns_that_kernel_only(provider: Path, tmp_path: Path) -> None:
    changed = replace(cast_signature(), scalars=(ScalarSpec("round_sf", "int32", 1),))
    sound = write_provider(tmp_path / "sound", replace(cast_signature(), kernel="quant.sound", op="quant_sound"))
    second = write_provider(tmp_path / "second", changed, name="other-sm90a")
    found = read_registry([provider, sound, second])
    assert set(found.signatures) == set(found.variants) == {"quant.sound"}
    (text,) = found.clashes.values()
    assert f"quant.cast: tkbuild-kernels-sm90a 0.1.0 ({provider}) and other-sm90a 0.1.0 ({second}) have other signatures" in text

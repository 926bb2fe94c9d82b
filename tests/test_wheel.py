"""Kernel wheels: whole, right, reproducible, and installable as data."""

from __future__ import annotations

import base64
import csv
import hashlib
import importlib.metadata
import io
import json
import os
import stat
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fake_toolkit import make_cubin

from tkbuild.arch import TargetArch
from tkbuild.digest import bytes_digest
from tkbuild.errors import IntegrityError, PackageError
from tkbuild.manifest import Manifest
from tkbuild.signature import KernelSignature
from tkbuild.wheel import (
    PackagedVariant,
    WheelRequest,
    compatible_versions,
    load_verified,
    total_resources,
    verified_state,
    write_wheel,
)

ROOT = Path(__file__).parent.parent
SM_90A, SM_100A = TargetArch.parse("sm_90a"), TargetArch.parse("sm_100a")
SIGNATURE = KernelSignature("t.k", "Summary.", "own", "t_k")
RESOURCES = {"kernel_kernel": {"registers": 40, "spill_bytes": 0, "stack_bytes": 0, "static_smem_bytes": 1024}}
REPORT = {"state": "verified", "device": "NVIDIA H200", "driver": "580.1", "cases": 12, "seed": 3}


def variant(name: str, cubin: bytes = b"", **changes: Any) -> PackagedVariant:
    launch = {"function": "kernel_kernel", "dynamic_smem_bytes": 8320}
    plan = {"schema": 1, "variant": f"t.k-{name}-sm_90a", "launches": [launch]}
    plain = PackagedVariant(f"t.k-{name}-sm_90a", SIGNATURE, {"block": 1}, plan, cubin or make_cubin() + name.encode(), RESOURCES)
    return replace(plain, **changes)


def wheel_request(*variants: PackagedVariant, **changes: Any) -> WheelRequest:
    variants = variants or (variant("a"), variant("b"))
    plain = WheelRequest(
        arch=SM_90A,
        version="0.1.0",
        wanted=[one.id for one in variants],
        variants=variants,
        toolchain={"cuda": "13.5.0", "tilelang": "0.1.15"},
        checks={"t.k": {"reference": "t.k"}, "other.kernel": {}},
        verified={bytes_digest(variants[0].cubin): REPORT},
        profiles={"default": [one.id for one in variants]},
    )
    return replace(plain, **changes)


def contents(path: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
        return {name: archive.read(name) for name in archive.namelist()}


def test_wheel_holds_exactly_what_it_should(tmp_path: Path) -> None:
    path = write_wheel(wheel_request(), tmp_path / "dist")
    assert path.name == "tkbuild_kernels_sm90a-0.1.0-py3-none-any.whl"
    files = contents(path)
    cubins = [f"tkbuild_kernels_sm90a/{bytes_digest(variant(name).cubin)[:16]}.cubin" for name in "ab"]
    info = "tkbuild_kernels_sm90a-0.1.0.dist-info"
    assert sorted(files) == sorted(
        [
            *cubins,
            "tkbuild_kernels_sm90a/__init__.py",
            "tkbuild_kernels_sm90a/checks.json",
            "tkbuild_kernels_sm90a/manifest.json",
            *(f"{info}/{name}" for name in ("METADATA", "WHEEL", "RECORD", "entry_points.txt")),
        ]
    )
    assert files[cubins[0]] == variant("a").cubin
    assert files[f"{info}/entry_points.txt"] == b"[tkbuild.kernels]\nsm_90a = tkbuild_kernels_sm90a\n"
    assert b"Requires-Dist: tkbuild (>=0.1,<0.2)\n" in files[f"{info}/METADATA"]
    assert b"Root-Is-Purelib: true\nTag: py3-none-any\n" in files[f"{info}/WHEEL"]
    assert json.loads(files["tkbuild_kernels_sm90a/checks.json"]) == {
        "kernels": {"t.k": {"reference": "t.k"}},
        "profiles": {"default": ["t.k-a-sm_90a", "t.k-b-sm_90a"]},
    }
    assert list(tmp_path.joinpath("dist").iterdir()) == [path]


def test_manifest_describes_every_file_and_variant(tmp_path: Path) -> None:
    files = contents(write_wheel(wheel_request(), tmp_path))
    manifest = Manifest.from_json(json.loads(files["tkbuild_kernels_sm90a/manifest.json"]))
    assert (manifest.name, manifest.version, manifest.arch) == ("tkbuild-kernels-sm90a", "0.1.0", "sm_90a")
    assert [one.id for one in manifest.variants] == ["t.k-a-sm_90a", "t.k-b-sm_90a"]
    named = {f"tkbuild_kernels_sm90a/{name}": facts for name, facts in manifest.files.items()}
    assert set(named) == {name for name in files if name.endswith((".cubin", "checks.json"))}
    for name, facts in named.items():
        assert facts == {"sha256": bytes_digest(files[name]), "bytes": len(files[name])}
    first, second = manifest.variants
    assert first.verified == {"state": "verified", "device": "NVIDIA H200", "driver": "580.1", "cases": 12}
    assert second.verified == {"state": "compiled, not run"}
    assert first.resources == {
        "registers": 40,
        "spill_bytes": 0,
        "stack_bytes": 0,
        "static_smem_bytes": 1024,
        "dynamic_smem_bytes": 8320,
        "cubin_bytes": len(variant("a").cubin),
    }
    damaged = json.loads(files["tkbuild_kernels_sm90a/manifest.json"])
    damaged["variants"].pop()
    with pytest.raises(IntegrityError, match="content_id"):
        Manifest.from_json(damaged)


def test_record_covers_every_other_file(tmp_path: Path) -> None:
    files = contents(write_wheel(wheel_request(), tmp_path))
    record = "tkbuild_kernels_sm90a-0.1.0.dist-info/RECORD"
    rows = {row[0]: row[1:] for row in csv.reader(io.StringIO(files[record].decode()))}
    assert list(rows) == list(files), "in the order of the archive, RECORD last"
    assert rows.pop(record) == ["", ""]
    for name, (digest, size) in rows.items():
        expected = base64.urlsafe_b64encode(hashlib.sha256(files[name]).digest()).rstrip(b"=").decode()
        assert (digest, size) == (f"sha256={expected}", str(len(files[name])))


def test_same_artifacts_give_the_same_bytes(tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        first = write_wheel(wheel_request(variant("a"), variant("b")), tmp_path / "one")
    finally:
        os.umask(before)
    other_order = wheel_request(variant("b"), variant("a"), verified={bytes_digest(variant("a").cubin): REPORT})
    second = write_wheel(other_order, tmp_path / "two/deeper")
    assert first.read_bytes() == second.read_bytes()
    with zipfile.ZipFile(first) as archive:
        assert {member.date_time for member in archive.infolist()} == {(1980, 1, 1, 0, 0, 0)}
        assert {member.external_attr >> 16 for member in archive.infolist()} == {stat.S_IFREG | 0o644}
    assert first.stat().st_mode & 0o777 == 0o644
    assert str(tmp_path).encode() not in first.read_bytes()


def test_wheel_is_the_same_in_another_process(tmp_path: Path) -> None:
    code = "import sys; sys.path.insert(0, 'tests'); import test_wheel as t; t.write_wheel(t.wheel_request(), t.Path(sys.argv[1]))"
    for seed in ("0", "7"):
        env = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT), "TZ": f"UTC+{seed}"}
        subprocess.run([sys.executable, "-c", code, str(tmp_path / seed)], cwd=ROOT, env=env, check=True)
    assert len({path.read_bytes() for path in tmp_path.rglob("*.whl")}) == 1


def test_equal_cubins_are_stored_once(tmp_path: Path) -> None:
    same = make_cubin()
    files = contents(write_wheel(wheel_request(variant("a", same), variant("b", same)), tmp_path))
    assert len([name for name in files if name.endswith(".cubin")]) == 1
    manifest = Manifest.from_json(json.loads(files["tkbuild_kernels_sm90a/manifest.json"]))
    assert len(manifest.variants) == 2


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (
            wheel_request(wanted=["t.k-a-sm_90a", "t.k-z-sm_90a", "t.k-y-sm_90a"]),
            "miss 2 variants: t.k-y-sm_90a, t.k-z-sm_90a; run `tkbuild compile`",
        ),
        (wheel_request(variant("a"), variant("a")), "given twice"),
        (replace(wheel_request(), variants=(), wanted=()), "would be empty"),
        (wheel_request(name="My_Kernels"), "'My_Kernels' is no name"),
        (wheel_request(version="latest"), "'latest' is no version"),
        (wheel_request(version="0.1.0+"), "'0.1.0+' is no version"),
        (wheel_request(variant("a", make_cubin("sm_100a"))), "its cubin is for sm_100a, the wheel for sm_90a"),
        (wheel_request(arch=SM_100A), "its cubin is for sm_90a, the wheel for sm_100a"),
        (wheel_request(variant("a", make_cubin(kernels=("other",)))), "its cubin lacks kernel_kernel"),
    ],
)
def test_incomplete_or_wrong_wheels_are_refused(tmp_path: Path, request_: WheelRequest, message: str) -> None:
    with pytest.raises(PackageError) as caught:
        write_wheel(request_, tmp_path)
    assert message in caught.value.message
    assert list(tmp_path.iterdir()) == []


def test_budget_names_the_biggest(tmp_path: Path) -> None:
    big = [variant(f"v{i:02}", make_cubin() + os.urandom(1000 * (i + 1))) for i in range(12)]
    whole = write_wheel(wheel_request(*big), tmp_path)
    size = whole.stat().st_size
    assert write_wheel(wheel_request(*big, max_bytes=size), tmp_path) == whole
    whole.unlink()
    with pytest.raises(PackageError) as caught:
        write_wheel(wheel_request(*big, max_bytes=size - 1), tmp_path)
    lines = caught.value.message.splitlines()
    assert f"has {size} bytes, its budget is {size - 1}" in lines[0]
    assert [line.split()[1] for line in lines[1:]] == [f"t.k-v{i:02}-sm_90a" for i in range(11, 1, -1)]
    assert lines[1].split()[0] == str(len(big[-1].cubin))
    assert list(tmp_path.iterdir()) == []


def test_unwritable_folder(tmp_path: Path) -> None:
    (tmp_path / "dist").write_text("")
    with pytest.raises(PackageError, match="give another --out"):
        write_wheel(wheel_request(), tmp_path / "dist")


def test_resources_of_several_kernels_and_run_time_smem() -> None:
    launches = [{"function": "a", "dynamic_smem_bytes": ["*", "T", 4]}, {"function": "b", "dynamic_smem_bytes": 16}]
    used = {
        "a": {"registers": 40, "spill_bytes": 8, "stack_bytes": 16, "static_smem_bytes": 0},
        "b": {"registers": 255, "spill_bytes": 4, "stack_bytes": 8, "static_smem_bytes": 128},
    }
    total = total_resources(variant("a", b"12345", plan={"launches": launches}, resources=used))
    assert total == {"registers": 255, "spill_bytes": 12, "stack_bytes": 16, "static_smem_bytes": 128, "cubin_bytes": 5}


def test_wheel_of_a_project_of_ones_own(tmp_path: Path) -> None:
    path = write_wheel(wheel_request(name="my-kernels"), tmp_path)
    assert path.name == "my_kernels_sm90a-0.1.0-py3-none-any.whl"
    assert contents(path)["my_kernels_sm90a-0.1.0.dist-info/entry_points.txt"] == b"[tkbuild.kernels]\nsm_90a = my_kernels_sm90a\n"


def test_only_a_report_on_this_cubin_verifies(tmp_path: Path) -> None:
    assert verified_state(None) == {"state": "compiled, not run"}
    assert verified_state({**REPORT, "state": "failed"}) == {"state": "compiled, not run"}
    path = tmp_path / "sm_90a.json"
    assert load_verified(path, SM_90A) == {}
    path.write_text(json.dumps({"arch": "sm_90a", "cubins": {"ab": REPORT}}))
    assert load_verified(path, SM_90A) == {"ab": REPORT}
    with pytest.raises(PackageError, match="is for sm_90a, expected sm_100a"):
        load_verified(path, SM_100A)
    path.write_text("{")
    with pytest.raises(PackageError, match=f"is no verification report.*--report {tmp_path}` .--report takes the folder"):
        load_verified(path, SM_90A)


@pytest.mark.parametrize(
    "report", [None, "verified", {}, {**REPORT, "cases": "12"}, {**REPORT, "device": None}, {"state": "verified"}]
)
def test_malformed_reports_are_refused(tmp_path: Path, report: Any) -> None:
    path = tmp_path / "sm_90a.json"
    path.write_text(json.dumps({"arch": "sm_90a", "cubins": {"ab": report}}))
    with pytest.raises(PackageError, match="is no verification report"):
        load_verified(path, SM_90A)


@pytest.mark.parametrize(
    ("version", "range_"),
    [
        ("0.1.0", ("0.1", "0.2")),
        ("0.1.7", ("0.1", "0.2")),
        ("1.4.2", ("1.4", "1.5")),
        ("0.2.0rc1", ("0.2.0rc1", "0.3")),
        ("0.1.0+local", ("0.1", "0.2")),
        ("1a1", ("1a1", "1.1")),
        ("2rc1", ("2rc1", "2.1")),
        ("1.0b2", ("1.0b2", "1.1")),
        ("1.post2", ("1.post2", "1.1")),
        ("1.dev3", ("1.dev3", "1.1")),
        ("3", ("3.0", "3.1")),
        ("0.1.0.dev0+partial", ("0.1.0.dev0", "0.2")),
    ],
)
def test_compatible_versions(version: str, range_: tuple[str, str]) -> None:
    assert compatible_versions(version) == range_


def test_unpacked_wheel_is_found_by_its_entry_point(tmp_path: Path) -> None:
    with zipfile.ZipFile(write_wheel(wheel_request(), tmp_path)) as archive:
        archive.extractall(tmp_path / "site")
    (distribution,) = importlib.metadata.distributions(path=[str(tmp_path / "site")])
    (entry,) = distribution.entry_points
    assert (distribution.name, distribution.version) == ("tkbuild-kernels-sm90a", "0.1.0")
    assert (entry.group, entry.name, entry.value) == ("tkbuild.kernels", "sm_90a", "tkbuild_kernels_sm90a")

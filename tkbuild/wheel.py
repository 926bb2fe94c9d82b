"""Artifacts of one arch -> a kernel wheel: data only, the same bytes from the same artifacts, nothing left out silently."""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import json
import os
import re
import tempfile
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from tkbuild.arch import TargetArch
from tkbuild.digest import bytes_digest, canonical_json
from tkbuild.elf import parse_cubin
from tkbuild.errors import PackageError
from tkbuild.manifest import CHECKS_NAME, ENTRY_POINT_GROUP, MANIFEST_NAME, NOT_RUN, VERIFIED, Manifest, VariantRecord
from tkbuild.signature import AxisValue, KernelSignature

DEFAULT_MAX_BYTES = 30_000_000
DEFAULT_NAME = "tkbuild-kernels"
_TAG = "py3-none-any"
_ZIP_TIME = (1980, 1, 1, 0, 0, 0)  # the earliest that a zip file can say
_FILE_MODE = 0o100644
_LISTED_BIGGEST = 10
_NAME = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")
_VERSION = re.compile(r"\d+(\.\d+)*((a|b|rc)\d+)?(\.post\d+)?(\.dev\d+)?(\+[a-z0-9]+(\.[a-z0-9]+)*)?", re.ASCII)

Json = Any


class Requested(Protocol):
    """What a wheel needs of a build request."""

    @property
    def variant(self) -> str: ...
    @property
    def signature(self) -> KernelSignature: ...
    @property
    def axes(self) -> Mapping[str, AxisValue]: ...


class Built(Protocol):
    """What a wheel needs of a built variant."""

    @property
    def request(self) -> Requested: ...
    @property
    def plan(self) -> Mapping[str, Json]: ...
    @property
    def cubin(self) -> bytes: ...
    @property
    def resources(self) -> Mapping[str, Mapping[str, int]]: ...


@dataclass(frozen=True)
class PackagedVariant:
    """A variant to pack. resources: by kernel function, as the compiler reported them."""

    id: str
    signature: KernelSignature
    axes: Mapping[str, AxisValue]
    plan: Mapping[str, Json]
    cubin: bytes
    resources: Mapping[str, Mapping[str, int]]

    @classmethod
    def of(cls, built: Built) -> PackagedVariant:
        """Return what a wheel takes of a built variant."""
        request = built.request
        return cls(request.variant, request.signature, request.axes, built.plan, built.cubin, built.resources)


@dataclass(frozen=True)
class WheelRequest:
    """What a wheel is made of.

    wanted: ids that must be in it.  checks: per kernel, what `verify` and `bench` run.  verified: reports of `verify` by
    cubin digest.  toolchain: names and versions.  profiles: by name, the ids of the variants that each asks of this wheel.
    name: the distribution's, without its arch.  max_bytes: of the finished wheel.
    """

    arch: TargetArch
    version: str
    wanted: Sequence[str]
    variants: Sequence[PackagedVariant]
    toolchain: Mapping[str, str]
    checks: Mapping[str, Json]
    verified: Mapping[str, Mapping[str, Json]]
    profiles: Mapping[str, Sequence[str]] = field(default_factory=dict)
    name: str = DEFAULT_NAME
    max_bytes: int = DEFAULT_MAX_BYTES

    @property
    def distribution(self) -> str:
        """The name of the distribution: ``tkbuild-kernels-sm90a``."""
        return f"{self.name}-{self.arch.wheel_suffix}"

    @property
    def module(self) -> str:
        """The name of its module: ``tkbuild_kernels_sm90a``."""
        return self.distribution.replace("-", "_")

    @property
    def file_name(self) -> str:
        """The wheel's file name."""
        return f"{self.module}-{self.version}-{_TAG}.whl"


def write_wheel(request: WheelRequest, out_dir: Path) -> Path:
    """Write the wheel into ``out_dir`` and return its path; on an error no file is left or changed.

    Raises: PackageError for a missing variant, a cubin for another arch, a version that is none, or a wheel over its
    budget (with the biggest cubins).
    """
    check_request(request)
    manifest, cubins = make_manifest(request)
    content = zip_bytes(wheel_files(request, manifest, cubins))
    if len(content) > request.max_bytes:
        raise PackageError(_too_big(request, len(content), manifest), bytes=len(content), max_bytes=request.max_bytes)
    return _write_whole(out_dir / request.file_name, content)


def check_request(request: WheelRequest) -> None:
    """Raises: PackageError listing everything that keeps ``request`` from being a whole and right wheel."""
    given = [variant.id for variant in request.variants]
    missing = sorted(set(request.wanted) - set(given))
    if missing:
        raise PackageError(
            f"{request.distribution} would miss {len(missing)} variants: {', '.join(missing)}; run `tkbuild compile`",
            missing=missing,
        )
    if len(set(given)) != len(given):
        raise PackageError(f"{request.distribution}: a variant is given twice", variants=given)
    if not given:
        raise PackageError(f"{request.distribution} would be empty; select variants for {request.arch}", arch=str(request.arch))
    if not _NAME.fullmatch(request.name):
        raise PackageError(f"{request.name!r} is no name of a wheel; expected lower-case words joined by '-'", name=request.name)
    if not _VERSION.fullmatch(request.version):
        raise PackageError(f"{request.version!r} is no version a wheel can have; expected such as 0.1.0", version=request.version)
    for variant in request.variants:
        _check_cubin(variant, request.arch)


def _check_cubin(variant: PackagedVariant, arch: TargetArch) -> None:
    facts = parse_cubin(variant.cubin)
    if facts.arch != str(arch):
        raise PackageError(
            f"{variant.id}: its cubin is for {facts.arch}, the wheel for {arch}; run `tkbuild compile`", variant=variant.id
        )
    launched = {launch["function"] for launch in variant.plan["launches"]}
    if absent := sorted(launched - set(facts.kernels)):
        raise PackageError(f"{variant.id}: its cubin lacks {', '.join(absent)}, which its launch plan names", variant=variant.id)


def make_manifest(request: WheelRequest) -> tuple[Manifest, dict[str, bytes]]:
    """Return the manifest and the files it names; equal cubins are one file."""
    files: dict[str, bytes] = {}
    records = []
    for variant in sorted(request.variants, key=lambda one: one.id):
        sha256 = bytes_digest(variant.cubin)
        name = f"{sha256[:16]}.cubin"
        if files.setdefault(name, variant.cubin) != variant.cubin:
            raise PackageError(f"two cubins share the name {name}", file=name)
        records.append(
            VariantRecord(
                id=variant.id,
                kernel=variant.signature.kernel,
                axes=variant.axes,
                cubin=name,
                sha256=sha256,
                plan=variant.plan,
                resources=total_resources(variant),
                verified=verified_state(request.verified.get(sha256)),
            )
        )
    kernels = {variant.signature.kernel: variant.signature for variant in request.variants}
    files[CHECKS_NAME] = canonical_json(
        {
            "kernels": {kernel: request.checks[kernel] for kernel in kernels if kernel in request.checks},
            "profiles": {name: sorted(ids) for name, ids in request.profiles.items()},
        }
    )
    manifest = Manifest(
        name=request.distribution,
        version=request.version,
        arch=str(request.arch),
        toolchain=request.toolchain,
        kernels=dict(sorted(kernels.items())),
        variants=tuple(records),
        files={name: {"sha256": bytes_digest(files[name]), "bytes": len(files[name])} for name in sorted(files)},
    )
    return manifest, files


def total_resources(variant: PackagedVariant) -> dict[str, int]:
    """Return what a variant uses: the most registers, stack and shared memory of its kernels, and all their spills.

    dynamic_smem_bytes is left out where it depends on the call.
    """
    kernels = variant.resources.values()
    total = {name: max(used[name] for used in kernels) for name in ("registers", "stack_bytes", "static_smem_bytes")}
    total["spill_bytes"] = sum(used["spill_bytes"] for used in kernels)
    total["cubin_bytes"] = len(variant.cubin)
    dynamic = [launch["dynamic_smem_bytes"] for launch in variant.plan["launches"]]
    if all(isinstance(size, int) for size in dynamic):
        total["dynamic_smem_bytes"] = max(dynamic, default=0)
    return total


def verified_state(report: Mapping[str, Json] | None) -> dict[str, Json]:
    """Return the manifest's word on a cubin: verified only if a report of `verify` on this very cubin says so."""
    if report is None or report.get("state") != VERIFIED:
        return {"state": NOT_RUN}
    return {"state": VERIFIED, **{name: report[name] for name in ("device", "driver", "cases")}}


def load_verified(path: Path, arch: TargetArch) -> dict[str, Mapping[str, Json]]:
    """Return ``read_reports``. Raises: PackageError if it cannot."""
    try:
        return read_reports(path, arch)
    except (OSError, ValueError) as exc:
        raise PackageError(
            f"{path} is no verification report: {exc}; run `tkbuild verify --report {path.parent}` (--report takes the folder)",
            path=str(path),
        ) from exc


def read_reports(path: Path, arch: TargetArch) -> dict[str, Mapping[str, Json]]:
    """Return the reports of `verify` in ``path``, a JSON file, by cubin digest; none if the file does not exist.

    Raises: ValueError if the file is malformed or for another arch, OSError.
    """
    try:
        content = json.loads(path.read_text("utf-8"))
        reports: dict[str, Mapping[str, Json]] = content["cubins"]
        for cubin, report in reports.items():
            _check_report(cubin, report)
        found = content.get("arch")
    except FileNotFoundError:
        return {}
    except (KeyError, TypeError, AttributeError, RecursionError) as exc:
        raise ValueError(f"{type(exc).__name__}: {exc}") from exc
    if found != str(arch):
        raise ValueError(f"it is for {found}, expected {arch}")
    return reports


def _check_report(cubin: str, report: Mapping[str, Json]) -> None:
    if not isinstance(report["state"], str):
        raise TypeError(f"{cubin}: state is {report['state']!r}, expected text")
    if report["state"] == VERIFIED:
        for name, kind in (("device", str), ("driver", str), ("cases", int)):
            if not isinstance(report[name], kind) or isinstance(report[name], bool):
                raise TypeError(f"{cubin}: {name} is {report[name]!r}, expected {kind.__name__}")


def wheel_files(request: WheelRequest, manifest: Manifest, cubins: Mapping[str, bytes]) -> dict[str, bytes]:
    """Return every file of the wheel by path, RECORD last."""
    info = f"{request.module}-{request.version}.dist-info"
    files = {f"{request.module}/{name}": content for name, content in cubins.items()}
    files[f"{request.module}/__init__.py"] = f'"""Kernels for {request.arch}, as data: read by tkbuild.runtime."""\n'.encode()
    files[f"{request.module}/{MANIFEST_NAME}"] = canonical_json(manifest.to_json()) + b"\n"
    files[f"{info}/METADATA"] = _metadata(request)
    files[f"{info}/WHEEL"] = f"Wheel-Version: 1.0\nGenerator: tkbuild\nRoot-Is-Purelib: true\nTag: {_TAG}\n".encode()
    files[f"{info}/entry_points.txt"] = f"[{ENTRY_POINT_GROUP}]\n{request.arch} = {request.module}\n".encode()
    files = dict(sorted(files.items(), key=lambda item: (".dist-info/" in item[0], item[0])))
    files[f"{info}/RECORD"] = _record(files, f"{info}/RECORD")
    return files


def _metadata(request: WheelRequest) -> bytes:
    least, below = compatible_versions(request.version)
    lines = [
        "Metadata-Version: 2.1",
        f"Name: {request.distribution}",
        f"Version: {request.version}",
        f"Summary: Compiled TileLang kernels for {request.arch}, for tkbuild",
        "License: MIT",
        "Requires-Python: >=3.10",
        f"Requires-Dist: tkbuild (>={least},<{below})",
    ]
    return ("\n".join(lines) + "\n").encode()


def compatible_versions(version: str) -> tuple[str, str]:
    """Return the first tkbuild that can load kernels of ``version``, and the first that cannot: the next minor version.

    Within them the manifest's runtime_abi decides. What follows a "+" in ``version`` tells wheels apart, not runtimes.
    """
    public = version.partition("+")[0]
    major, minor = (int(part or 0) for part in re.findall(r"^(\d+)(?:\.(\d+))?", public)[0])
    least = public if re.search(r"[a-z]", public) else f"{major}.{minor}"
    return least, f"{major}.{minor + 1}"


def _record(files: Mapping[str, bytes], own_path: str) -> bytes:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    for path, content in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
        writer.writerow([path, f"sha256={digest}", len(content)])
    writer.writerow([own_path, "", ""])
    return text.getvalue().encode()


def zip_bytes(files: Mapping[str, bytes]) -> bytes:
    """Return a zip archive of ``files`` in their order, with fixed times and modes.

    Stored, not deflated: what deflate writes depends on the build of zlib, and equal wheels must be equal everywhere.
    """
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for path, content in files.items():
            member = zipfile.ZipInfo(path, _ZIP_TIME)
            member.create_system = 3  # Unix, so that the mode counts
            member.external_attr = _FILE_MODE << 16
            archive.writestr(member, content, zipfile.ZIP_STORED)
    return buffer.getvalue()


def _too_big(request: WheelRequest, size: int, manifest: Manifest) -> str:
    users: dict[str, list[str]] = {}
    for variant in manifest.variants:
        users.setdefault(variant.cubin, []).append(variant.id)
    biggest = sorted(users, key=lambda name: (-manifest.files[name]["bytes"], name))[:_LISTED_BIGGEST]
    rows = "\n".join(f"  {manifest.files[name]['bytes']:>10}  {', '.join(users[name])}" for name in biggest)
    return (
        f"{request.file_name} has {size} bytes, its budget is {request.max_bytes}; build fewer variants or raise --max-bytes."
        f" The biggest cubins, in bytes:\n{rows}"
    )


def _write_whole(path: Path, content: bytes) -> Path:
    """Write ``path`` whole or not at all."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(content)
                os.fchmod(file.fileno(), 0o644)
            Path(name).replace(path)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise
    except OSError as exc:
        raise PackageError(f"cannot write {path}: {exc.strerror}; give another --out", path=str(path)) from exc
    return path

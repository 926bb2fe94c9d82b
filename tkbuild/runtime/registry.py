"""Which kernels are installed: manifests of kernel wheels, and of the directories in TKBUILD_KERNELS.

A kernel wheel is data. It is found through its entry point, never imported, and its files are read where they lie.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import importlib.util
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tkbuild.arch import TargetArch
from tkbuild.collector import collector_paused
from tkbuild.elf import cubin_arch
from tkbuild.errors import IntegrityError, PackageError, pip_install
from tkbuild.manifest import CHECKS_NAME, ENTRY_POINT_GROUP, MANIFEST_NAME, Manifest, VariantRecord
from tkbuild.signature import KernelSignature

#: Directories with a manifest.json, separated as PATH is: kernels under development, looked at before installed wheels.
KERNELS_VARIABLE = "TKBUILD_KERNELS"


def reinstall(wheel: str) -> str:
    """Return what to do about a damaged kernel wheel."""
    return f"reinstall the kernel wheel: {pip_install(wheel)}"


def install_kernels() -> str:
    """Return the command that installs the kernel wheels that tkbuild ships."""
    return f"for Hopper {pip_install('tkbuild-kernels-sm90a')}, for Blackwell tkbuild-kernels-sm100a"


@dataclass(frozen=True)
class InstalledVariant:
    """One variant as a kernel wheel offers it; ``root`` is the folder of its cubin, ``toolkit`` the CUDA release that made it."""

    id: str
    kernel: str
    arch: TargetArch
    axes: Mapping[str, Any]
    record: VariantRecord
    root: Path
    wheel: str
    toolkit: str

    def cubin(self) -> bytes:
        """Return the cubin's bytes. Raises: IntegrityError when bytes or arch are not what the manifest says."""
        path = self.root / self.record.cubin
        try:
            found = path.read_bytes()
        except OSError as exc:
            raise IntegrityError(f"{path}: {exc.strerror}; {reinstall(self.wheel)}", path=str(path)) from exc
        digest = hashlib.sha256(found).hexdigest()
        if digest != self.record.sha256:
            raise IntegrityError(
                f"{path}: sha256 {digest}, the manifest says {self.record.sha256}; {reinstall(self.wheel)}",
                path=str(path),
            )
        self._check_arch(path, found)
        return found

    def _check_arch(self, path: Path, content: bytes) -> None:
        try:
            arch = cubin_arch(content)
        except IntegrityError as exc:
            raise IntegrityError(f"{path}: {exc.message}; {reinstall(self.wheel)}", path=str(path)) from exc
        if arch != str(self.arch):
            raise IntegrityError(
                f"{path}: {self.id}: its cubin is for {arch}, the manifest says {self.arch}; {reinstall(self.wheel)}",
                path=str(path),
                variant=self.id,
            )


@dataclass(frozen=True)
class Registry:
    """Every installed kernel. ``variants`` maps a kernel's name to its variants, those of earlier providers first.

    clashes: why a kernel is not among them, by its name: two wheels have other signatures for it.  shadowed: for each kernel of which
    a wheel has variants that never run, since an earlier wheel has other code under their ids, the sentence that says so.
    """

    signatures: Mapping[str, KernelSignature]
    variants: Mapping[str, tuple[InstalledVariant, ...]]
    providers: tuple[tuple[Path, Manifest], ...]
    clashes: Mapping[str, str]
    shadowed: Mapping[str, str]

    def all_variants(self) -> list[InstalledVariant]:
        return [variant for variants in self.variants.values() for variant in variants]


@functools.cache
def registry() -> Registry:
    """Return the registry of this process, reading the manifests at the first call.

    Raises: IntegrityError, PackageError for a damaged provider or one made for another runtime.
    """
    with collector_paused():
        return read_registry([*_development_roots(os.environ.get(KERNELS_VARIABLE, "")), *_installed_roots()])


def _development_roots(value: str) -> list[Path]:
    roots = []
    for entry in filter(None, value.split(os.pathsep)):
        root = Path(entry)
        try:
            found = (root / MANIFEST_NAME).is_file()
        except OSError as exc:
            raise PackageError(
                f"{KERNELS_VARIABLE}: {entry!r}: {exc.strerror}; name readable module folders of unpacked kernel wheels", root=entry
            ) from exc
        if not found:
            raise PackageError(
                f"{KERNELS_VARIABLE}: {entry!r} has no {MANIFEST_NAME}; name module folders of unpacked kernel wheels", root=entry
            )
        roots.append(root)
    return roots


def _installed_roots() -> list[Path]:
    points = sorted(importlib.metadata.entry_points(group=ENTRY_POINT_GROUP), key=lambda point: (point.name, point.value))
    return [root for point in points for root in _module_folders(point.value)]


def _module_folders(module: str) -> list[Path]:
    spec = importlib.util.find_spec(module)
    return [Path(place) for place in (spec.submodule_search_locations or ())] if spec else []


def read_registry(roots: Iterable[Path]) -> Registry:
    """Return the registry of the providers in ``roots``; of equal variant ids the first provider's counts."""
    providers = tuple((root, read_manifest(root)) for root in roots)
    clashes = _clashes(providers)
    signatures: dict[str, KernelSignature] = {}
    variants: dict[str, dict[str, InstalledVariant]] = {}
    shadowed: dict[str, str] = {}
    for root, manifest in providers:
        signatures |= {kernel: signature for kernel, signature in manifest.kernels.items() if kernel not in clashes}
        for record in manifest.variants:
            if record.kernel in clashes:
                continue
            first = variants.setdefault(record.kernel, {}).setdefault(record.id, installed(record, root, manifest))
            if first.record.sha256 != record.sha256:
                shadowed.setdefault(record.kernel, _shadow_text(first, root, manifest))
    return Registry(signatures, {kernel: tuple(found.values()) for kernel, found in variants.items()}, providers, clashes, shadowed)


def _clashes(providers: Iterable[tuple[Path, Manifest]]) -> dict[str, str]:
    first: dict[str, tuple[Path, Manifest]] = {}
    clashes: dict[str, str] = {}
    for root, manifest in providers:
        for kernel, signature in manifest.kernels.items():
            at, other = first.setdefault(kernel, (root, manifest))
            if other.kernels[kernel] != signature:
                clashes[kernel] = (
                    f"{kernel}: {other.name} {other.version} ({at}) and {manifest.name} {manifest.version} ({root}) have other signatures "
                    f"for it; {_ONE_NAME}"
                )
    return clashes


_ONE_NAME = "install kernel wheels of one release, or give one of the two another kernel name and build its wheel again"


def _shadow_text(first: InstalledVariant, root: Path, manifest: Manifest) -> str:
    return (
        f"{first.kernel}: {manifest.name} ({root}) has other code than {first.wheel} ({first.root}) under the same variant ids; that of "
        f"{first.wheel} runs; {_ONE_NAME}"
    )


def installed(record: VariantRecord, root: Path, manifest: Manifest) -> InstalledVariant:
    """Return the variant that ``record`` of the kernel wheel in ``root`` describes."""
    arch, toolkit = TargetArch.parse(manifest.arch), manifest.toolchain.get("cuda", "")
    return InstalledVariant(record.id, record.kernel, arch, record.axes, record, root, manifest.name, toolkit)


def read_manifest(root: Path) -> Manifest:
    """Return the manifest in ``root``. Raises: IntegrityError if it is damaged, PackageError for another runtime ABI."""
    path, wheel = root / MANIFEST_NAME, root.name.replace("_", "-")
    try:
        return Manifest.from_text(path.read_text("utf-8"))
    except IntegrityError as exc:
        raise IntegrityError(f"{path}: {exc.message}; {reinstall(wheel)}", **{**exc.facts, "path": str(path)}) from exc
    except (OSError, ValueError, RecursionError) as exc:
        raise IntegrityError(f"{path}: {exc}; {reinstall(wheel)}", path=str(path)) from exc


def read_checks_file(root: Path, manifest: Manifest) -> Mapping[str, Any]:
    """Return the content of the provider's ``checks.json``: ``kernels`` and ``profiles``.

    Raises: IntegrityError if it is missing, malformed or not the file that the manifest names.
    """
    path = root / CHECKS_NAME
    try:
        content = path.read_bytes()
        value = json.loads(content)
    except (OSError, ValueError, RecursionError) as exc:
        raise IntegrityError(f"{path}: {exc}; {reinstall(manifest.name)}", path=str(path)) from exc
    if hashlib.sha256(content).hexdigest() != manifest.files.get(CHECKS_NAME, {}).get("sha256"):
        raise IntegrityError(f"{path}: its sha256 is not the manifest's; {reinstall(manifest.name)}", path=str(path))
    if not isinstance(value, dict) or not all(isinstance(value.get(part), dict) for part in ("kernels", "profiles")):
        raise IntegrityError(f"{path}: expected an object with kernels and profiles; {reinstall(manifest.name)}", path=str(path))
    return value


def read_profiles(root: Path, manifest: Manifest) -> dict[str, tuple[str, ...]]:
    """Return the ids of the variants that each profile asks of the provider in ``root``, by the profile's name.

    Raises: IntegrityError as ``read_checks_file``, and for a profile that is no list of ids.
    """
    profiles = read_checks_file(root, manifest)["profiles"]
    for ids in profiles.values():
        if not isinstance(ids, list) or not all(isinstance(one, str) for one in ids):
            path = root / CHECKS_NAME
            raise IntegrityError(f"{path}: a profile is no list of variant ids; {reinstall(manifest.name)}", path=str(path))
    return {name: tuple(ids) for name, ids in profiles.items()}

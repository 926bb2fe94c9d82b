"""Manifests: what a kernel wheel holds, as strict JSON with a digest over itself (DESIGN.md section 4).

A leaf used on both sides: `wheel` writes manifests, the runtime's registry reads them. Standard library only.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tkbuild.arch import TargetArch
from tkbuild.errors import IntegrityError, PackageError, TkbuildError, pip_install
from tkbuild.signature import KernelSignature

SCHEMA = 1
#: The contract between launch plans, cubins and the native launcher. A runtime loads manifests of its own number only.
RUNTIME_ABI = 2
MANIFEST_NAME = "manifest.json"
CHECKS_NAME = "checks.json"
ENTRY_POINT_GROUP = "tkbuild.kernels"
VERIFIED = "verified"
NOT_RUN = "compiled, not run"

Json = Any


@dataclass(frozen=True)
class VariantRecord:
    """One variant in a manifest.

    cubin: file name beside the manifest.  sha256: of that file.  plan: its launch plan.  resources: registers, bytes of
    spills, stack and shared memory.  verified: ``{"state": "verified", "device", "driver", "cases"}`` or
    ``{"state": "compiled, not run"}``.
    """

    id: str
    kernel: str
    axes: Mapping[str, bool | int | str]
    cubin: str
    sha256: str
    plan: Mapping[str, Json] = field(repr=False)
    resources: Mapping[str, int] = field(default_factory=dict, repr=False)
    verified: Mapping[str, Json] = field(default_factory=lambda: {"state": NOT_RUN})

    def to_json(self) -> dict[str, Json]:
        return {
            "id": self.id,
            "kernel": self.kernel,
            "axes": dict(self.axes),
            "cubin": self.cubin,
            "plan": dict(self.plan),
            "resources": dict(self.resources),
            "verified": dict(self.verified),
        }


@dataclass(frozen=True)
class Manifest:
    """The contents of a kernel wheel. ``files`` maps every file but the manifest to its sha256 and size in bytes."""

    name: str
    version: str
    arch: str
    toolchain: Mapping[str, str]
    kernels: Mapping[str, KernelSignature]
    variants: tuple[VariantRecord, ...]
    files: Mapping[str, Mapping[str, Json]]
    runtime_abi: int = RUNTIME_ABI

    def to_json(self) -> dict[str, Json]:
        """Return the JSON object, ``content_id`` included."""
        body = self._body()
        return {**body, "content_id": content_id(body)}

    def _body(self) -> dict[str, Json]:
        return {
            "schema": SCHEMA,
            "runtime_abi": self.runtime_abi,
            "name": self.name,
            "version": self.version,
            "arch": self.arch,
            "toolchain": dict(self.toolchain),
            "kernels": {kernel: signature.to_json() for kernel, signature in self.kernels.items()},
            "variants": [variant.to_json() for variant in self.variants],
            "files": {name: dict(facts) for name, facts in self.files.items()},
        }

    @classmethod
    def from_text(cls, text: str) -> Manifest:
        """Return the manifest of a JSON text. Raises: ValueError for no JSON; IntegrityError as ``from_json``."""
        return cls.from_json(json.loads(text), text)

    @classmethod
    def from_json(cls, value: object, text: str = "") -> Manifest:
        """Return the manifest of a JSON object, which ``text`` spells, if given.

        Raises: IntegrityError for another schema, a content id that does not match, a missing or malformed field, and
        a variant whose cubin is no listed file, PackageError for another runtime ABI.
        """
        if not isinstance(value, dict):
            raise IntegrityError("a manifest is a JSON object")
        _check_identity(value, text)
        try:
            return _manifest_from_json(value)
        except PackageError:
            raise
        except TkbuildError as exc:
            raise IntegrityError(f"malformed manifest: {exc.message}", **exc.facts) from exc
        except (KeyError, TypeError, AttributeError, ValueError, RecursionError) as exc:
            raise IntegrityError(f"malformed manifest: {type(exc).__name__}: {exc}") from exc


def content_id(body: Mapping[str, Json]) -> str:
    """Return the sha256 of a manifest's canonical JSON without its ``content_id``."""
    text = json.dumps({key: item for key, item in body.items() if key != "content_id"}, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def _content_id_of_text(text: str, found: Json) -> str:
    """Return what ``content_id`` returns, from a text that is canonical, as wheels hold it: without writing all of it again."""
    body = text.rstrip("\n").replace(f'"content_id":"{found}",', "", 1)
    return hashlib.sha256(body.encode()).hexdigest()


def _check_identity(value: Mapping[str, Json], text: str) -> None:
    if value.get("schema") != SCHEMA:
        raise IntegrityError(
            f"manifest schema {value.get('schema')!r}, this tkbuild reads {SCHEMA}; install tkbuild and kernels of one release"
        )
    found = value.get("content_id")
    if found != _content_id_of_text(text, found) and found != content_id(value):
        raise IntegrityError("the manifest was changed after it was written: its content_id does not match", name=value.get("name"))


def _check_abi(name: str, version: str, abi: int) -> None:
    """Before the rest is read, which another ABI may have in another form."""
    if abi != RUNTIME_ABI:
        newer = "tkbuild" if abi > RUNTIME_ABI else name
        raise PackageError(
            f"{name} {version} is built for runtime ABI {abi}, this tkbuild has {RUNTIME_ABI}; install a newer {newer}: {pip_install(newer)}",
            name=name,
        )


def _manifest_from_json(value: Mapping[str, Json]) -> Manifest:
    _check_abi(_text(value["name"]), _text(value["version"]), _int(value["runtime_abi"]))
    files = {name: _object(facts) for name, facts in _object(value["files"]).items()}
    variants = tuple(_variant_from_json(_object(item), files) for item in _list(value["variants"]))
    kernels = {kernel: KernelSignature.from_json(kernel, item) for kernel, item in _object(value["kernels"]).items()}
    if unknown := sorted({variant.kernel for variant in variants} - set(kernels)):
        raise IntegrityError(f"variants of kernels without a signature: {', '.join(unknown)}")
    return Manifest(
        name=_text(value["name"]),
        version=_text(value["version"]),
        arch=str(TargetArch.parse(value["arch"])),
        toolchain={part: _text(version) for part, version in _object(value["toolchain"]).items()},
        kernels=kernels,
        variants=variants,
        files=files,
        runtime_abi=_int(value["runtime_abi"]),
    )


def _variant_from_json(item: Mapping[str, Json], files: Mapping[str, Json]) -> VariantRecord:
    cubin = _text(item["cubin"])
    if cubin not in files or "/" in cubin or "\\" in cubin:
        raise IntegrityError(f"{item['id']}: its cubin {cubin!r} is not among the manifest's files", variant=item["id"])
    return VariantRecord(
        id=_text(item["id"]),
        kernel=_text(item["kernel"]),
        axes={axis: _axis_value(chosen) for axis, chosen in _object(item["axes"]).items()},
        cubin=cubin,
        sha256=_text(files[cubin]["sha256"]),
        plan=_object(item["plan"]),
        resources={name: _int(used) for name, used in _object(item["resources"]).items()},
        verified=_verified(item["verified"]),
    )


def _verified(value: Json) -> Mapping[str, Json]:
    if _object(value).get("state") not in (VERIFIED, NOT_RUN):
        raise TypeError(f"expected a verified state, found {value!r}")
    return _object(value)


def _axis_value(value: Json) -> bool | int | str:
    if not isinstance(value, (bool, int, str)):
        raise TypeError(f"expected true, false, a whole number or text, found {value!r}")
    return value


def _object(value: Json) -> dict[str, Json]:
    if not isinstance(value, dict):
        raise TypeError(f"expected an object, found {value!r}")
    return value


def _list(value: Json) -> list[Json]:
    if not isinstance(value, list):
        raise TypeError(f"expected a list, found {value!r}")
    return value


def _int(value: Json) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"expected a whole number, found {value!r}")
    return value


def _text(value: Json) -> str:
    if not isinstance(value, str):
        raise TypeError(f"expected text, found {value!r}")
    return value

"""``python -m tkbuild.runtime`` and the functions behind it: profiles, patterns, archs, damage, exit codes."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fake_toolkit import make_cubin
from runtime.providers import cast_signature, write_json, write_provider

from tkbuild.errors import ArgumentError, IntegrityError, NoVariantError, PackageError
from tkbuild.manifest import CHECKS_NAME, MANIFEST_NAME, content_id
from tkbuild.runtime import api, health, op, registry, torch_ops
from tkbuild.runtime.__main__ import main
from tkbuild.signature import KernelSignature

KERNEL = "quant.cast"
BLACKWELL, HOPPER = (f"{KERNEL}-bfloat16-32-256-{arch}" for arch in ("sm_100a", "sm_90a"))


@pytest.fixture
def roots(tmp_path: Path) -> list[Path]:
    """Two providers, the one for sm_100a first, both with a profile ``default`` and one that is empty."""
    return [
        write_provider(tmp_path / arch, cast_signature(), arch, profiles={"default": [one], "none": []})
        for arch, one in (("sm_100a", BLACKWELL), ("sm_90a", HOPPER))
    ]


@pytest.fixture(autouse=True)
def installed(roots: list[Path], monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv(registry.KERNELS_VARIABLE, os.pathsep.join(map(str, roots)))
    monkeypatch.setattr(registry, "_installed_roots", list)
    registry.registry.cache_clear()
    yield
    registry.registry.cache_clear()


def edit(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    value = json.loads(path.read_text())
    change(value)
    write_json(path, {**value, "content_id": content_id(value)})


def test_profile_is_the_union_of_the_providers_and_follows_arch(capsys: pytest.CaptureFixture[str]) -> None:
    assert health.profile_patterns("default") == [BLACKWELL, HOPPER]
    assert health.profile_patterns("default", "sm_90a") == [HOPPER]
    assert main(["require", "default", "--arch", "sm_90a"]) == 0
    assert "1 variants installed and intact" in capsys.readouterr().out
    assert main(["require", "default"]) == 0
    assert "2 variants installed and intact" in capsys.readouterr().out


def test_a_profile_of_one_wheel(capsys: pytest.CaptureFixture[str]) -> None:
    assert health.profile_patterns("default", None, "tkbuild-kernels") == [BLACKWELL, HOPPER]
    assert health.profile_patterns("default", None, "tkbuild-kernels-sm90a") == [HOPPER]
    assert main(["require", "default", "--arch", "sm_90a", "--wheel", "my-kernels"]) == NoVariantError.exit_code
    assert (
        "no kernel wheel my-kernels is installed for sm_90a; installed: tkbuild-kernels-sm100a, tkbuild-kernels-sm90a; pip install"
        in capsys.readouterr().err
    )


def test_a_wheel_of_another_arch(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["require", "default", "--arch", "sm_103a", "--wheel", "tkbuild-kernels"]) == NoVariantError.exit_code
    told = capsys.readouterr().err
    assert (
        "no kernel wheel tkbuild-kernels is installed for sm_103a; installed: tkbuild-kernels-sm100a, tkbuild-kernels-sm90a" in told
    )
    assert "--find-links FOLDER tkbuild-kernels-sm103a" in told


def test_profile_of_an_arch_that_is_not_installed() -> None:
    assert main(["require", "default", "--arch", "sm_103a"]) == NoVariantError.exit_code


def test_a_misspelt_profile_is_told_what_profiles_there_are() -> None:
    with pytest.raises(ArgumentError, match=r"no profile 'defalt' in the installed kernel wheels; there are: .*default"):
        health.profile_patterns("defalt")


@pytest.mark.parametrize("profile", ["none", ""])
def test_profile_without_patterns(profile: str) -> None:
    with pytest.raises(ArgumentError, match="names no pattern"):
        health.profile_patterns(profile)


def test_changed_checks_are_refused(roots: list[Path]) -> None:
    path = roots[0] / CHECKS_NAME
    path.write_bytes(path.read_bytes() + b" ")
    with pytest.raises(IntegrityError, match=f"{path}: .*; reinstall the kernel wheel: .* tkbuild-kernels-sm100a"):
        health.profile_patterns("default")
    assert main(["require", "default"]) == 6
    assert not wheels_finding().ok


def test_missing_checks_are_found_by_doctor(roots: list[Path]) -> None:
    (roots[1] / CHECKS_NAME).unlink()
    assert "checks.json" in wheels_finding().found
    assert not wheels_finding().ok


@pytest.mark.parametrize(
    "content", [b"{", b"\xff", b"[]", b"{}", b'{"profiles": []}', b'{"profiles": {"default": "a"}}', b"[" * 200_000]
)
def test_malformed_checks_with_the_right_digest(roots: list[Path], content: bytes) -> None:
    (roots[0] / CHECKS_NAME).write_bytes(content)
    facts = {"sha256": hashlib.sha256(content).hexdigest(), "bytes": len(content)}
    edit(roots[0] / MANIFEST_NAME, lambda manifest: manifest["files"].update({CHECKS_NAME: facts}))
    with pytest.raises(IntegrityError, match="reinstall"):
        health.profile_patterns("default")


@pytest.mark.parametrize("content", [b"# nothing\n", b"\xff\xfe"])
def test_profile_file_that_says_nothing(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "profile").write_bytes(content)
    with pytest.raises(ArgumentError, match="profile"):
        health.profile_patterns(str(tmp_path / "profile"))


def test_profile_path_that_is_too_long() -> None:
    with pytest.raises(ArgumentError, match="give a readable UTF-8 file"):
        health.profile_patterns("x" * 5000)


def test_kernels_variable_that_is_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(registry.KERNELS_VARIABLE, "/" + "x" * 5000)
    with pytest.raises(PackageError, match=r"TKBUILD_KERNELS: .*name readable module folders"):
        registry.registry()


@pytest.mark.parametrize("patterns", ["", [], ["quant.*", ""]])
def test_require_refuses_empty_patterns(patterns: Any) -> None:
    with pytest.raises(ArgumentError, match="at least one and none empty"):
        api.require(patterns)


def test_require_parses_the_arch() -> None:
    assert api.require(KERNEL, "9.0a") == api.require(KERNEL, "sm_90a")
    with pytest.raises(ArgumentError, match="is no target arch"):
        api.require(KERNEL, "hopper")


def test_cubin_of_another_arch_is_refused_by_require_load_and_doctor(roots: list[Path]) -> None:
    """Digests are right throughout: only the ELF header tells."""
    content = make_cubin("sm_100a")
    digest = hashlib.sha256(content).hexdigest()

    def swap(manifest: dict[str, Any]) -> None:
        name = manifest["variants"][-1]["cubin"]
        (roots[1] / name).write_bytes(content)
        manifest["files"][name] = {"sha256": digest, "bytes": len(content)}

    edit(roots[1] / MANIFEST_NAME, swap)
    variant = registry.registry().all_variants()[-1]
    for refuse in (lambda: api.require(variant.id), lambda: op.load(variant), lambda: api.load(variant.id)):
        with pytest.raises(IntegrityError, match="its cubin is for sm_100a, the manifest says sm_90a; reinstall"):
            refuse()
    finding = next(finding for finding in health.examine() if finding.what == "kernel wheels")
    assert not finding.ok
    assert "its cubin is for sm_100a" in finding.found


def test_list_that_matches_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", "zzz*"]) == 14
    assert main(["list", "zzz*", "--json"]) == 14
    found = json.loads(capsys.readouterr().out)
    assert (found["error"], found["exit_code"]) == ("PatternError", 14)
    assert "'zzz*' matches no installed variant" in found["message"]
    assert main(["list", "*@sm_90a", "--json"]) == 0
    listed = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert len(listed) == 8
    assert {one["state"] for one in listed} == {"compiled, not run"}


@pytest.fixture
def other(tmp_path: Path, roots: list[Path], monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Installs a further wheel, ``other-sm90a``, that has the kernel as well."""

    def install(signature: KernelSignature, code: bytes) -> None:
        root = write_provider(tmp_path / "other", signature, code=code, name="other-sm90a")
        monkeypatch.setenv(registry.KERNELS_VARIABLE, os.pathsep.join(map(str, (*roots, root))))
        registry.registry.cache_clear()

    return install


def wheels_finding() -> health.Finding:
    return next(finding for finding in health.examine() if finding.what == "kernel wheels")


def test_a_kernel_of_two_wheels_with_other_code_names_both(other: Callable[..., None], capsys: pytest.CaptureFixture[str]) -> None:
    other(cast_signature(), b"other")
    assert main(["require", KERNEL, "--arch", "sm_90a"]) == 0
    told = capsys.readouterr().out
    assert "8 variants installed and intact (8 of tkbuild-kernels-sm90a)\nnote: quant.cast: other-sm90a (" in told
    assert "that of tkbuild-kernels-sm90a runs" in told
    assert main(["list", KERNEL]) == 0
    assert "note: quant.cast: other-sm90a (" in capsys.readouterr().out
    assert not wheels_finding().ok
    assert "other-sm90a" in wheels_finding().found


def test_a_kernel_with_two_signatures_is_the_only_one_missing(
    other: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    other(replace(cast_signature(), scalars=()), b"")
    assert torch_ops.registry().signatures == {}
    for command in (["require", KERNEL], ["require", HOPPER], ["list", KERNEL]):
        assert main(command) == PackageError.exit_code
        told = capsys.readouterr().err
        assert "quant.cast: tkbuild-kernels-sm100a 0.1.0 (" in told
        assert " and other-sm90a 0.1.0 (" in told
    assert main(["list"]) == 0
    assert "note: quant.cast: tkbuild-kernels-sm100a" in capsys.readouterr().out
    assert "other-sm90a" in wheels_finding().found
    with pytest.raises(PackageError, match="other-sm90a"):
        op.KernelOp(KERNEL)((None,))


@pytest.mark.parametrize(
    ("arguments", "text"),
    [([], "required"), (["requir"], "invalid choice: 'requir'"), (["require"], "profile"), (["list", "--bogus"], "--bogus")],
)
def test_wrong_command_lines(arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == ArgumentError.exit_code
    assert text in capsys.readouterr().err
    assert main([*arguments, "--json"]) == ArgumentError.exit_code
    found = json.loads(capsys.readouterr().out)
    assert (found["error"], found["exit_code"]) == ("ArgumentError", 12)


def test_patterns_are_those_of_the_build_side(capsys: pytest.CaptureFixture[str]) -> None:
    for arch in ("sm_90a", "90a", "9.0a"):
        assert main(["list", f"*@{arch}"]) == 0
        assert len(capsys.readouterr().out.splitlines()) == 8
    for pattern, text in (("*@sm_9*", "is no target arch"), (f"{KERNEL}-bfloat16-32-256", "matches no installed variant")):
        assert main(["list", pattern]) == 14
        assert text in capsys.readouterr().err


def test_nothing_installed_is_said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv(registry.KERNELS_VARIABLE, "")
    registry.registry.cache_clear()
    assert main(["list", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["note"].startswith("no kernel wheel is installed; for Hopper pip install --no-deps")


def test_two_kernels_with_one_op_name() -> None:
    first = cast_signature()
    with pytest.raises(PackageError, match=r"quant\.cast and other\.cast are both torch\.ops\.tkbuild\.quant_cast"):
        torch_ops._check_op_names([first, replace(first, kernel="other.cast")])

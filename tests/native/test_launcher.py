"""The native launcher against a stand-in for the driver, and what its library file must be like."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
CASES = re.findall(r"^def case_(\w+)", (HERE / "cases.py").read_text(encoding="utf-8"), re.MULTILINE)
ALLOWED_LIBRARIES = {"libc.so.6", "libm.so.6", "libdl.so.2", "libpthread.so.0"}


@pytest.fixture(scope="session")
def build() -> ModuleType:
    """The build hook, imported from its file."""
    spec = importlib.util.spec_from_file_location("hatch_build", ROOT / "hatch_build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def library(build: ModuleType) -> Path:
    """The launcher of this host, compiled if its sources have changed."""
    path: Path = build.ensure_launcher(ROOT, build.host_arch(), ROOT / build.LAUNCHER_DIR / build.LIBRARY_NAME)
    return path


def compile_fake(build: ModuleType, folder: Path, *flags: str) -> None:
    """Compile the stand-in driver into ``folder``; tvm-ffi loads it under the second name."""
    includes = [flag for path in build.ffi_include_dirs() for flag in ("-isystem", str(path))]
    output = folder / "libcuda.so.1"
    command = ["g++", "-std=c++17", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", *flags, *includes]
    folder.mkdir()
    subprocess.run([*command, str(HERE / "fake_cuda.cc"), "-o", str(output)], check=True)
    (folder / "libfake_cuda.so").symlink_to(output)


@pytest.fixture(scope="session")
def results(build: ModuleType, library: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What went wrong in each case, run in a process that finds no driver by itself; an empty text is a success."""
    folder = tmp_path_factory.mktemp("drivers")
    compile_fake(build, folder / "fake")
    compile_fake(build, folder / "old", "-DFAKE_OLD_DRIVER")
    (folder / "missing").mkdir()
    (folder / "missing" / "libcuda.so.1").write_bytes(b"no library")
    paths = [str(folder / "missing"), *filter(None, [os.environ.get("LD_LIBRARY_PATH")])]
    # Without the variable tvm_ffi asks torch for CUDA, which would initialise a driver before the cases do.
    more = {"LD_LIBRARY_PATH": os.pathsep.join(paths), "TVM_FFI_DISABLE_TORCH_C_DLPACK": "1"}
    command = [sys.executable, str(HERE / "run_cases.py"), "--folder", str(folder), "--library", str(library)]
    done = subprocess.run(command, env={**os.environ, **more}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, str] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("case", CASES)
def test_case(case: str, results: dict[str, str]) -> None:
    assert results[case] == ""


def readelf(library: Path, option: str) -> str:
    done = subprocess.run(["readelf", "--wide", option, str(library)], capture_output=True, text=True, check=True)
    return done.stdout


def check_portable(library: Path, glibc: str) -> None:
    """Assert that the library needs an old glibc alone and exports its FFI functions alone."""
    needed = set(re.findall(r"\(NEEDED\).*\[(.+)\]", readelf(library, "--dynamic")))
    assert needed <= ALLOWED_LIBRARIES
    newest = tuple(int(part) for part in glibc.split("."))
    versions = re.findall(r"Name: (\S+)", readelf(library, "--version-info"))
    assert versions
    for version in versions:
        assert version.startswith("GLIBC_")
        assert tuple(int(part) for part in version.removeprefix("GLIBC_").split(".")) <= newest
    symbols = [line.split() for line in readelf(library, "--dyn-syms").splitlines() if re.match(r" +\d+:", line)]
    defined = {fields[7] for fields in symbols if len(fields) > 7 and fields[6] != "UND"}
    assert "__tvm_ffi_load" in defined
    assert all(name.startswith("__tvm_ffi_") for name in defined)
    undefined = {fields[7].split("@")[0] for fields in symbols if len(fields) > 7 and fields[6] == "UND"}
    assert not [name for name in undefined if name.startswith("_Z")]


def test_library_is_manylinux(build: ModuleType, library: Path) -> None:
    check_portable(library, build.GLIBC)


def test_library_builds_for_the_other_arch(build: ModuleType, tmp_path: Path) -> None:
    (arch,) = set(build.ARCHS) - {build.host_arch()}
    built = tmp_path / build.LIBRARY_NAME
    build.compile_launcher(ROOT, arch, built)
    check_portable(built, build.GLIBC)
    machine = {"aarch64": "AArch64", "x86_64": "X86-64"}[arch]
    assert machine in readelf(built, "--file-header")


def test_library_is_the_same_from_another_folder(build: ModuleType, library: Path, tmp_path: Path) -> None:
    sources = tmp_path / "elsewhere" / build.LAUNCHER_DIR
    sources.mkdir(parents=True)
    for path in build.launcher_sources(ROOT):
        shutil.copy(path, sources)
    build.compile_launcher(tmp_path / "elsewhere", build.host_arch(), tmp_path / build.LIBRARY_NAME)
    assert (tmp_path / build.LIBRARY_NAME).read_bytes() == library.read_bytes()
    assert str(ROOT).encode() not in library.read_bytes()


@pytest.fixture
def compiled(build: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Path]]:
    """What would have been compiled in a source tree of one header, a.h: the arch and where it goes."""
    calls: list[tuple[str, Path]] = []

    def compile_launcher(root: Path, arch: str, output: Path) -> None:
        calls.append((arch, output.relative_to(tmp_path)))
        output.write_bytes(b"library")

    monkeypatch.setattr(build, "compile_launcher", compile_launcher)
    sources = tmp_path / build.LAUNCHER_DIR
    sources.mkdir(parents=True)
    (sources / "a.h").write_text("// one")
    return calls


def test_library_is_compiled_again_only_after_a_change(build: ModuleType, compiled: list[tuple[str, Path]], tmp_path: Path) -> None:
    output = tmp_path / "lib" / build.LIBRARY_NAME
    build.ensure_launcher(tmp_path, "x86_64", output)
    build.ensure_launcher(tmp_path, "x86_64", output)
    assert len(compiled) == 1
    (tmp_path / build.LAUNCHER_DIR / "a.h").write_text("// two")
    build.ensure_launcher(tmp_path, "x86_64", output)
    build.ensure_launcher(tmp_path, "aarch64", output)
    assert [arch for arch, _ in compiled] == ["x86_64", "x86_64", "aarch64"]


@pytest.mark.parametrize("arch", ["x86_64", "aarch64"])
def test_wheels_do_not_touch_the_source_tree(
    build: ModuleType, compiled: list[tuple[str, Path]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arch: str
) -> None:
    monkeypatch.setenv("TKBUILD_LAUNCHER_ARCH", arch)
    hook = build.LauncherBuildHook(str(tmp_path), {}, None, None, str(tmp_path / "dist"), "wheel")
    data: dict[str, Any] = {"force_include": {}}
    hook.initialize("standard", data)
    output = Path("build") / "launcher" / arch / build.LIBRARY_NAME
    assert compiled == [(arch, output)]
    assert data == {
        "pure_python": False,
        "tag": f"py3-none-manylinux_2_28_{arch}",
        "force_include": {str(tmp_path / output): f"tkbuild/launcher/{build.LIBRARY_NAME}"},
    }


def test_editable_installs_build_in_the_source_tree(
    build: ModuleType, compiled: list[tuple[str, Path]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TKBUILD_LAUNCHER_ARCH", raising=False)
    hook = build.LauncherBuildHook(str(tmp_path), {}, None, None, str(tmp_path / "dist"), "wheel")
    data: dict[str, Any] = {"force_include": {}}
    hook.initialize("editable", data)
    assert compiled == [(build.host_arch(), build.LAUNCHER_DIR / build.LIBRARY_NAME)]
    assert data["force_include"] == {}


def test_unknown_arch_is_refused(build: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"TKBUILD_LAUNCHER_ARCH: 'riscv64' is not known; use one of: x86_64, aarch64"):
        build.compile_command(ROOT, "riscv64", tmp_path / "x.so")

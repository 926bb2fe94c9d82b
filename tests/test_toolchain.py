"""Finding and checking toolkits, running processes, and compiler flags."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from fake_build import full_disk
from fake_toolkit import FakeToolkit

from tkbuild import toolchain, versions, workfolder
from tkbuild.arch import TargetArch
from tkbuild.digest import _recorded_form
from tkbuild.errors import StepTimeoutError, ToolchainError, WorkFolderError
from tkbuild.toolchain import ProcessGroups, clean_environment, find, install, run

SM_90A, SM_103A = TargetArch.parse("sm_90a"), TargetArch.parse("sm_103a")


@pytest.fixture
def kit(tmp_path: Path) -> FakeToolkit:
    return FakeToolkit.create(tmp_path / "cuda")


# ---- finding


def test_everything_comes_from_one_root(kit: FakeToolkit) -> None:
    found = kit.toolchain()
    assert (found.version, found.release, found.host_release) == ((13, 5), "13.5.37", "12.2.0")
    assert found.nvcc == kit.root / "bin/nvcc"
    assert found.environment()["PATH"].split(":")[:2] == [str(kit.root / "bin"), str(kit.root / "nvvm/bin")]


def test_tools_on_path_are_not_used(kit: FakeToolkit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = FakeToolkit.create(tmp_path / "old", release="12.8.1", header=12080)
    monkeypatch.setenv("PATH", f"{old.root / 'bin'}:{os.environ['PATH']}")
    assert kit.toolchain().version == (13, 5)
    with pytest.raises(ToolchainError, match=r"sm_103a needs CUDA 12\.9 or later, found 12\.8 at .*old/bin/nvcc"):
        old.toolchain().require(SM_103A)
    old.toolchain().require(SM_90A)


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ("", "it is empty"),
        ("  ", "it is empty"),
        (":{root}", "a list of paths"),
        ("{root}:{root}", "a list of paths"),
        ("relative/cuda", "no such folder"),
        ("/nonexistent/cuda", "no such folder"),
        ("{dangling}", "dangling link"),
        ("{empty}", "lacks bin/nvcc"),
    ],
)
def test_bad_roots_are_named(kit: FakeToolkit, tmp_path: Path, value: str, problem: str) -> None:
    (tmp_path / "dangling").symlink_to(tmp_path / "gone")
    (tmp_path / "empty").mkdir()
    given = value.format(root=kit.root, dangling=tmp_path / "dangling", empty=tmp_path / "empty")
    with pytest.raises(ToolchainError, match=problem) as caught:
        find(given, host_compiler=kit.root / "bin/g++")
    assert "--cuda-home" in caught.value.message
    assert "tkbuild doctor --install-toolchain" in caught.value.message
    assert given.strip() in caught.value.message


@pytest.mark.parametrize("name", ["cuda with a space", "cuda'quote", "cuda$(touch x)"])
def test_odd_but_right_roots_work(tmp_path: Path, name: str) -> None:
    kit = FakeToolkit.create(tmp_path / name)
    assert find(f"{kit.root}/", host_compiler=kit.root / "bin/g++").version == (13, 5)
    assert not (tmp_path / "x").exists()


def test_relative_roots_work(kit: FakeToolkit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert find("cuda", host_compiler=kit.root / "bin/g++").root == kit.root


def test_parts_of_different_versions_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ToolchainError, match=r"nvcc 13\.5, ptxas 13\.1, cuda\.h 13\.5"):
        FakeToolkit.create(tmp_path / "a", ptxas_release="13.1.80").toolchain()
    with pytest.raises(ToolchainError, match=r"nvcc 13\.5, ptxas 13\.5, cuda\.h 12\.9"):
        FakeToolkit.create(tmp_path / "b", header=12090).toolchain()


@pytest.mark.parametrize("part", ["bin/ptxas", "bin/cudafe++", "nvvm/bin/cicc", "include/cuda.h"])
def test_missing_parts_are_named(kit: FakeToolkit, part: str) -> None:
    (kit.root / part).unlink()
    with pytest.raises(ToolchainError, match=f"lacks {re.escape(part)}"):
        kit.toolchain()


def test_tool_that_does_not_run(kit: FakeToolkit) -> None:
    (kit.root / "bin/ptxas").write_text("#!/bin/sh\necho broken >&2; exit 127\n")
    with pytest.raises(ToolchainError, match=r"ptxas does not tell its version: 'broken'"):
        kit.toolchain()
    (kit.root / "bin/ptxas").chmod(0o644)
    with pytest.raises(ToolchainError, match=r"lacks bin/ptxas \(not executable\)"):
        kit.toolchain()


def test_tool_that_hangs(kit: FakeToolkit, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toolchain, "_VERSION_TIMEOUT_S", 0.2)
    (kit.root / "bin/ptxas").write_text("#!/bin/sh\nsleep 60\n")
    with pytest.raises(ToolchainError, match=r"ptxas does not tell its version within 0\.2 s; run `tkbuild doctor --install"):
        kit.toolchain()


def test_tool_whose_answer_found_no_room(kit: FakeToolkit, monkeypatch: pytest.MonkeyPatch) -> None:
    full_disk(monkeypatch, free_bytes=0)
    kit.toolchain()
    (kit.root / "bin/ptxas").write_text("#!/bin/sh\n")
    with pytest.raises(WorkFolderError, match=r"0 bytes free; .*what failed: .*ptxas does not tell its version"):
        kit.toolchain()


def test_missing_host_compiler_says_how_to_get_it(kit: FakeToolkit, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(ToolchainError, match=r"apt-get install g\+\+"):
        find(kit.root)


def test_digests_follow_content_only(kit: FakeToolkit, tmp_path: Path) -> None:
    same = FakeToolkit.create(tmp_path / "elsewhere/cuda")
    for name in ("bin/nvcc", "bin/ptxas", "nvvm/bin/cicc"):  # the scripts name their root; real tools do not
        (same.root / name).write_bytes((kit.root / name).read_bytes())
    before = kit.toolchain().digests
    assert same.toolchain().digests == before
    os.utime(kit.root / "include/cuda.h", (0, 0))
    assert kit.toolchain().digests == before
    (kit.root / "include/cuda_runtime.h").write_text("// changed\n")
    after = kit.toolchain().digests
    assert (after["compiler"], after["headers"] != before["headers"]) == (before["compiler"], True)
    (kit.root / "nvvm/bin/cicc").write_text("#!/bin/sh\n# other\n")
    assert kit.toolchain().digests["compiler"] != before["compiler"]


def test_no_toolkit_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toolchain, "default_prefix", lambda: tmp_path / "cuda-13")
    with pytest.raises(ToolchainError, match="run `tkbuild doctor --install-toolchain`"):
        find()


def test_place_of_the_toolkit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toolchain, "__file__", str(tmp_path / "tkbuild" / "toolchain.py"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert toolchain.default_prefix().parent == tmp_path / "home/.cache/tkbuild"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert toolchain.default_prefix().parent == tmp_path / "cache/tkbuild"
    (tmp_path / "pyproject.toml").touch()
    assert toolchain.default_prefix().parent == tmp_path / ".toolchain"


# ---- installing


def _fake_pip(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, body: str) -> None:
    script = tmp_path / "python"
    script.write_text(f"#!/bin/sh\n{body}\n")
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))


PACKAGES = (*toolchain._CONTENT_PACKAGES, *toolchain._OTHER_PACKAGES)


@pytest.fixture
def pip_prefix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A toolkit as pip leaves it, which the fake pip copies to where it is asked to."""
    prefix = tmp_path / "pip"
    kit = FakeToolkit.create(prefix / "nvidia/cu13")
    (kit.root / "include/cuda_fp8.h").touch()
    files = sorted(path.relative_to(prefix).as_posix() for path in (prefix / "nvidia").rglob("*") if path.is_file())
    for name in PACKAGES:
        info = prefix / f"{name.replace('-', '_')}-1.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n")
        mine = files if name == PACKAGES[0] else []
        rows = [f"{file},{_recorded_form(prefix / file)},{(prefix / file).stat().st_size}" for file in mine]
        (info / "RECORD").write_text("\n".join([*rows, f"{info.name}/RECORD,,"]))
    _fake_pip(monkeypatch, tmp_path, f'echo "$@" >> {tmp_path}/calls; cp -a {prefix} "$5"')
    return prefix


def test_install_publishes_a_whole_prefix_once(tmp_path: Path, pip_prefix: Path) -> None:
    prefix, told = tmp_path / "tools/cuda-1", []
    assert install(prefix, tell=told.append) == install(prefix, tell=told.append) == prefix
    assert (prefix / "nvidia/cu13").is_dir()
    assert told == [f"{prefix} is not there; installing the CUDA toolkit {versions.CUDA_VERSION} to {prefix}"]
    (call,) = (tmp_path / "calls").read_text().splitlines()
    assert call.endswith(" ".join(versions.CUDA_REQUIREMENTS))
    assert [path.name for path in prefix.parent.iterdir()] == ["cuda-1"]


def _cut_short(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def _flip_a_bit_unseen(path: Path) -> None:
    before, content = path.stat(), path.read_bytes()
    path.write_bytes(bytes([content[0] ^ 1]) + content[1:])
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


DAMAGE = [
    ("nvidia/cu13/bin/ptxas", Path.unlink, "ptxas is missing, or not as it was installed"),
    ("nvidia/cu13/nvvm/bin/cicc", _cut_short, "cicc is missing, or not as it was installed"),
    ("nvidia/cu13/include/cuda_runtime.h", _flip_a_bit_unseen, "cuda_runtime.h is missing, or not as it was installed"),
    ("nvidia/cu13/bin/nvcc", lambda path: path.chmod(0o644), r"bin/nvcc \(not executable\)"),
    ("nvidia_nvvm-1.dist-info", shutil.rmtree, "lacks nvidia-nvvm"),
    ("nvidia_cuda_crt-1.dist-info/RECORD", lambda path: path.write_text(""), "RECORD is missing, or not"),
    ("", shutil.rmtree, "is not there"),
    ("", lambda path: [shutil.rmtree(path), path.mkdir()], "lacks nvidia-cuda-nvcc"),
]


@pytest.mark.parametrize(("place", "harm", "reason"), DAMAGE)
def test_install_mends_a_damaged_toolkit(
    tmp_path: Path, pip_prefix: Path, place: str, harm: Callable[[Path], object], reason: str
) -> None:
    prefix, told = install(tmp_path / "tools/cuda-1"), []
    harm(prefix / place)
    install(prefix, tell=told.append)
    assert re.search(reason, told[0])
    assert toolchain.damage(prefix) == ""
    assert [path.name for path in prefix.parent.iterdir()] == ["cuda-1"]


def test_toolkit_of_another_version_is_replaced(tmp_path: Path, pip_prefix: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prefix = install(tmp_path / "tools/cuda-1")
    monkeypatch.setattr(toolchain, "CUDA_VERSION", "13.6.0")
    assert "is CUDA 13.5.37" in toolchain.damage(prefix)
    with pytest.raises(ToolchainError, match=r"pip installed a CUDA toolkit that is not whole: .* is CUDA 13\.5\.37"):
        install(prefix)
    assert (prefix / "nvidia/cu13/bin/nvcc").is_file()


def test_failed_repair_leaves_what_was_there(tmp_path: Path, pip_prefix: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prefix = install(tmp_path / "tools/cuda-1")
    (prefix / "nvidia/cu13/include/cuda.h").write_text("#define CUDA_VERSION 13050 // mine\n")
    _fake_pip(monkeypatch, tmp_path, "exit 1")
    with pytest.raises(ToolchainError, match="pip could not install"):
        install(prefix)
    assert "mine" in (prefix / "nvidia/cu13/include/cuda.h").read_text()


def test_missing_file_of_the_toolkit_names_the_remedy(pip_prefix: Path) -> None:
    (pip_prefix / "nvidia/cu13/include/cuda_fp8.h").unlink()
    with pytest.raises(ToolchainError, match=r"is damaged: .* is missing now.*run `tkbuild doctor --install-toolchain`"):
        find(pip_prefix)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_stopped_install_leaves_no_process_and_no_folder(tmp_path: Path, number: signal.Signals) -> None:
    pip = tmp_path / "python"
    pip.write_text(f'#!/bin/sh\nmkdir -p "$5" "$TMPDIR/pip-temp"; echo $$ > {tmp_path}/pid\nexec sleep 300\n')
    pip.chmod(0o755)
    code = f"""
import sys
from pathlib import Path
from tkbuild.toolchain import install
sys.executable = {str(pip)!r}
install(Path({str(tmp_path / "tools/cuda-1")!r}))
"""
    process = subprocess.Popen([sys.executable, "-c", code], cwd=Path(__file__).parent.parent, stderr=subprocess.DEVNULL)
    started = _wait_for(tmp_path / "pid")
    process.send_signal(number)
    assert process.wait(10) != 0
    assert _is_gone(started)
    assert list((tmp_path / "tools").iterdir()) == []


def test_install_removes_what_dead_ones_left(tmp_path: Path, pip_prefix: Path) -> None:
    space = workfolder.this_owner().partition("-")[0]
    names = [f".installing-{space}-{2**30}-1-dead", ".installing-0123456789abcdef-1-1-foreign"]
    for name in names:
        (tmp_path / "tools" / name / "prefix").mkdir(parents=True)
    with workfolder.private_folder(tmp_path / "tools", ".installing-") as living:
        install(tmp_path / "tools/cuda-1")
        assert sorted(path.name for path in (tmp_path / "tools").iterdir()) == sorted([names[1], "cuda-1", Path(living).name])


def test_failed_install_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _fake_pip(monkeypatch, tmp_path, 'mkdir -p "$5/nvidia"; echo "no matching distribution" >&2; exit 1')
    with pytest.raises(ToolchainError, match="no matching distribution"):
        install(tmp_path / "tools/cuda-1")
    assert list((tmp_path / "tools").iterdir()) == []


def test_install_into_a_file(tmp_path: Path) -> None:
    (tmp_path / "tools").write_text("")
    with pytest.raises(ToolchainError, match=r"make that folder writable.* --cuda-home"):
        install(tmp_path / "tools/cuda-1")


def test_versions_agree_with_the_project() -> None:
    project = (Path(__file__).parent.parent / "pyproject.toml").read_text()
    assert 'dynamic = ["version"]' in project
    assert 'path = "tkbuild/__init__.py"' in project
    assert set(re.findall(r'"tilelang==([^"]+)"', project)) == {versions.TILELANG_VERSION}


# ---- running


def test_run_returns_what_the_process_wrote() -> None:
    finished = run(["/bin/sh", "-c", "echo out; echo err >&2; exit 3"], timeout_s=10)
    assert (finished.returncode, finished.stdout, finished.stderr) == (3, "out\n", "err\n")


def test_environment_is_clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CPATH", "NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS", "CUDA_HOME", "LD_PRELOAD", "LC_MESSAGES", "GCC_EXEC_PREFIX"):
        monkeypatch.setenv(name, "/evil")
    monkeypatch.setenv("PATH", f":relative:{os.environ['PATH']}")
    lines = run(["/usr/bin/env"], timeout_s=10).stdout.splitlines()
    assert {line.split("=")[0] for line in lines} <= {"PATH", "LC_ALL", "LANG", "TZ", "TMPDIR", "PWD", "SHLVL", "_"}
    assert "LC_ALL=C" in lines
    assert "relative" not in clean_environment()["PATH"]


def _is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def _is_gone(pid: int) -> bool:
    """Whether a killed process goes away; the kernel takes a moment."""
    return any(not _is_alive(pid) or time.sleep(0.01) for _ in range(500))


def _wait_for(path: Path) -> int:
    for _ in range(500):
        if path.exists() and path.read_text().strip():
            return int(path.read_text())
        time.sleep(0.01)
    raise AssertionError(f"{path} did not appear")


def test_time_out_ends_the_whole_group(tmp_path: Path) -> None:
    script = f"trap '' TERM; sleep 300 & echo $! > {tmp_path}/pid; wait"
    started = time.monotonic()
    with pytest.raises(StepTimeoutError, match=r"sh was stopped after 0\.5 s"):
        run(["/bin/sh", "-c", script], timeout_s=0.5)
    assert time.monotonic() - started < 5
    assert _is_gone(_wait_for(tmp_path / "pid"))


def test_background_child_does_not_block_the_reader() -> None:
    started = time.monotonic()
    finished = run(["/bin/sh", "-c", "sleep 2 & echo done"], timeout_s=10)
    assert finished.stdout == "done\n"
    assert time.monotonic() - started < 1.5


def test_interrupt_ends_the_whole_group(tmp_path: Path) -> None:
    # A runner started in the background ignores SIGINT, and so do its children unless they ask for it.
    code = f"""
import signal
from tkbuild.toolchain import run
signal.signal(signal.SIGINT, signal.default_int_handler)
run(["/bin/sh", "-c", "trap '' TERM INT; sleep 300 & echo $! > {tmp_path}/pid; wait"], timeout_s=100)
"""
    process = subprocess.Popen([sys.executable, "-c", code], cwd=Path(__file__).parent.parent, stderr=subprocess.DEVNULL)
    grandchild = _wait_for(tmp_path / "pid")
    process.send_signal(signal.SIGINT)
    assert process.wait(10) != 0
    assert _is_gone(grandchild)


def test_stop_signals_interrupt_unless_they_are_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    try:
        with pytest.raises(KeyboardInterrupt), toolchain.stop_signals_interrupt():
            signal.raise_signal(signal.SIGHUP)
            signal.raise_signal(signal.SIGTERM)
            raise AssertionError("SIGTERM did not interrupt")
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    finally:
        signal.signal(signal.SIGHUP, before)


def test_closed_groups_start_nothing(tmp_path: Path) -> None:
    groups = ProcessGroups()
    process = groups.start(["/bin/sleep", "300"])
    groups.close()
    assert process.wait(5) == -signal.SIGKILL
    with pytest.raises(ToolchainError, match="is being stopped"):
        groups.start(["/bin/true"])


# ---- TileLang


@pytest.mark.toolchain
def test_tilelang_is_found_without_importing_it() -> None:
    package = toolchain.find_tilelang()
    assert package.version == versions.TILELANG_VERSION
    assert (package.include_dirs[0] / "tl_templates/cuda/common.h").is_file()
    assert (package.include_dirs[1] / "cute").is_dir()


def test_other_tilelang_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    info = tmp_path / "tilelang-0.1.14.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: tilelang\nVersion: 0.1.14\n")
    monkeypatch.setattr(importlib.metadata, "distribution", lambda name: importlib.metadata.PathDistribution(info))
    with pytest.raises(ToolchainError, match=r"pip install tilelang==0\.1\.15"):
        toolchain.find_tilelang()

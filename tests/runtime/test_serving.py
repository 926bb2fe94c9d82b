"""The serving side as an image sees it: in fresh interpreters, with no compiler, no build packages and no writes."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from runtime.providers import cast_signature, write_provider

from tkbuild.errors import MissingPackageError

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def kernels(tmp_path: Path) -> Path:
    return write_provider(tmp_path / "kernels", cast_signature())


def run_python(code: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run ``code`` in a fresh interpreter that sees this checkout and ``env``."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **env}
    command = [sys.executable, "-W", "ignore", "-c", textwrap.dedent(code)]
    # From another folder: -c puts the current one first on the path.
    return subprocess.run(command, env=environment, cwd=ROOT.anchor, capture_output=True, text=True, timeout=120, check=False)


def lines(code: str, **env: str) -> list[str]:
    done = run_python(code, **env)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_import_brings_no_build_package_and_starts_no_cuda(kernels: Path) -> None:
    code = """
        import gc, os, sys, signal, logging, threading
        import torch
        before = (gc.isenabled(), dict(os.environ), sys.getdlopenflags(), signal.getsignal(signal.SIGINT), logging.root.handlers[:], threading.active_count())
        import tkbuild.ops, tkbuild.runtime
        after = (gc.isenabled(), dict(os.environ), sys.getdlopenflags(), signal.getsignal(signal.SIGINT), logging.root.handlers[:], threading.active_count())
        print(before == after)
        print(sorted({"tilelang", "tvm", "jinja2", "yaml", "click"} & set(sys.modules)))
        print(torch.cuda.is_initialized())
    """
    assert lines(code, TKBUILD_KERNELS=str(kernels)) == ["True", "[]", "False"]


def test_missing_launcher_names_what_builds_it(tmp_path: Path) -> None:
    code = f"""
        from pathlib import Path
        from tkbuild.errors import PackageError
        from tkbuild.runtime.launcher import NativeLauncher
        try:
            NativeLauncher(Path({str(tmp_path / "gone.so")!r}))
        except PackageError as exc:
            print(exc)
    """
    (told,) = lines(code)
    assert "pip install --no-deps --editable . builds it" in told
    cleaned = subprocess.run(["make", "-n", "clean"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert {"tkbuild/launcher/*.so", "tkbuild/launcher/*.stamp", ".venv/.installed"} <= set(cleaned.split())


def test_import_without_the_build_packages_at_all(kernels: Path, tmp_path: Path) -> None:
    for name in ("tilelang", "tvm", "jinja2", "yaml", "click"):
        (tmp_path / f"{name}.py").write_text("raise ImportError('not in a serving image')\n")
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    code = "import tkbuild.ops, tkbuild.runtime; print(len(tkbuild.runtime.kernels()['quant.cast']))"
    assert lines(code, TKBUILD_KERNELS=str(kernels), PYTHONPATH=path) == ["8"]


@pytest.mark.parametrize("arguments", [["list"], ["doctor", "--json"], ["require", "default"], ["--help"]])
def test_command_without_torch_says_what_to_install(tmp_path: Path, arguments: list[str]) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('libcudart.so: cannot\\nopen')\n")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    command = [sys.executable, "-m", "tkbuild.runtime", *arguments]
    done = subprocess.run(command, env=environment, cwd=ROOT.anchor, capture_output=True, text=True, timeout=120, check=False)
    message = "torch is missing: libcudart.so: cannot open; pip install 'torch>=2.10'"
    assert (done.returncode, done.stderr) == (MissingPackageError.exit_code, f"error: {message}\n")
    if "--json" in arguments:
        assert json.loads(done.stdout) == {"error": "MissingPackageError", "message": message, "exit_code": 20}
    else:
        assert done.stdout == ""


def test_import_without_torch_is_an_import_error(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('none here')\n")
    done = run_python("import tkbuild.runtime", PYTHONPATH=os.pathsep.join([str(tmp_path), str(ROOT)]))
    assert done.returncode == 1
    assert done.stderr.endswith("ImportError: none here\n")


def test_import_list_and_read_write_nothing_and_start_nothing(kernels: Path) -> None:
    code = """
        import os, sys
        import torch
        events = []
        def hook(event, args):
            if event == "open" and isinstance(args[2], int) and args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
                events.append((event, args[0]))
            elif event in ("os.mkdir", "os.rename", "os.remove", "os.symlink", "subprocess.Popen", "os.system", "os.exec", "os.fork", "socket.connect"):
                events.append((event, args))
        sys.addaudithook(hook)
        import tkbuild.ops, tkbuild.runtime
        tkbuild.runtime.kernels()
        from tkbuild.runtime.launcher import native
        from tkbuild.runtime.registry import registry
        for variant in registry().all_variants():
            variant.cubin()
        print(native().launch_count(), events)
    """
    assert lines(code, TKBUILD_KERNELS=str(kernels), PYTHONDONTWRITEBYTECODE="1") == ["0 []"]


def test_works_from_a_read_only_home(kernels: Path) -> None:
    code = "import tkbuild.ops, tkbuild.runtime; print(sum(map(len, tkbuild.runtime.kernels().values())))"
    env = {"HOME": "/nonexistent", "TMPDIR": "/nonexistent", "TKBUILD_KERNELS": str(kernels), "PYTHONDONTWRITEBYTECODE": "1"}
    assert lines(code, **env) == ["8"]


@pytest.mark.parametrize(
    "order",
    ["import torch, tkbuild.ops", "import tkbuild.ops, torch", "import tvm_ffi, tkbuild.ops", "import tkbuild.ops, tvm_ffi"],
)
def test_import_orders(kernels: Path, order: str) -> None:
    assert lines(f"{order}\nprint('fine')", TKBUILD_KERNELS=str(kernels)) == ["fine"]


def test_schema_and_fake_results(kernels: Path) -> None:
    code = """
        import torch
        from torch._subclasses import FakeTensorMode
        import tkbuild.ops
        print(torch.ops.tkbuild.quant_cast.default._schema)
        with FakeTensorMode():
            x = torch.empty(5, 256, dtype=torch.float32, device="cuda")
            out, sf = torch.ops.tkbuild.quant_cast(x, block=128)
            print(tuple(out.shape), out.dtype, out.stride(), tuple(sf.shape), sf.dtype, sf.device)
            out, sf = torch.ops.tkbuild.quant_cast(torch.empty(0, 256, dtype=torch.float32, device="cuda"), block=32)
            print(tuple(out.shape), tuple(sf.shape))
    """
    assert lines(code, TKBUILD_KERNELS=str(kernels)) == [
        "tkbuild::quant_cast(Tensor x, *, int block, bool col_major=False, int round_sf=0) -> (Tensor, Tensor)",
        "(5, 256) torch.float8_e4m3fn (256, 1) (5, 2) torch.float32 cuda:0",
        "(0, 256) (0, 8)",
    ]


def test_symbolic_tracing_keeps_the_token_count_free(kernels: Path) -> None:
    code = """
        import torch
        from torch.fx.experimental.proxy_tensor import make_fx
        from torch._subclasses import FakeTensorMode
        from torch.fx.experimental.symbolic_shapes import ShapeEnv, DimDynamic, StatelessSymbolicContext
        import tkbuild.ops
        mode = FakeTensorMode(shape_env=ShapeEnv(), static_shapes=False, allow_non_fake_inputs=True)
        with mode:
            x = torch.empty(7, 256, dtype=torch.bfloat16, device="cuda")
        graph = make_fx(lambda x: torch.ops.tkbuild.quant_cast(x, block=32)[1], tracing_mode="fake")(x)
        print([str(node.target) for node in graph.graph.nodes if node.op == "call_function"][0])
    """
    assert lines(code, TKBUILD_KERNELS=str(kernels)) == ["tkbuild.quant_cast.default"]


def test_cpu_tensors_are_refused_with_the_way_out(kernels: Path) -> None:
    code = """
        import torch, tkbuild.ops
        from tkbuild.errors import ArgumentError
        for call in (lambda: torch.ops.tkbuild.quant_cast(torch.empty(4, 128), block=32), lambda: tkbuild.ops.transpose.transpose(torch.empty(64, 64))):
            try:
                call()
            except Exception as exc:
                print(type(exc).__name__, "tkbuild.reference" in str(exc) or "not in the installed" in str(exc))
    """
    assert lines(code, TKBUILD_KERNELS=str(kernels)) == ["ArgumentError True", "NoVariantError True"]


def test_no_wheel_installed_says_what_to_install() -> None:
    code = """
        import torch, tkbuild.ops
        try:
            tkbuild.ops.transpose.transpose(torch.empty(64, 64))
        except Exception as exc:
            print(type(exc).__name__, "--find-links FOLDER tkbuild-kernels-sm90a" in str(exc))
    """
    done = run_python(code, TKBUILD_KERNELS="")
    if "NoVariantError" in done.stdout:
        assert done.stdout.split() == ["NoVariantError", "True"]
    else:  # a kernel wheel is installed beside the tests
        assert "ArgumentError" in done.stdout


def test_first_of_two_copies_on_the_path_wins(kernels: Path, tmp_path: Path) -> None:
    copies = [install(tmp_path / name) for name in ("first", "second")]
    code = """
        import sys, tkbuild.ops, tkbuild.runtime
        print(len(tkbuild.runtime.kernels()["quant.cast"]))
        print(*{module.__file__.split("/tkbuild/")[0] for name, module in sys.modules.items() if name.split(".")[0] == "tkbuild"})
    """
    path = os.pathsep.join(map(str, copies))
    assert lines(code, TKBUILD_KERNELS=str(kernels), PYTHONPATH=path) == ["8", str(copies[0])]


def install(site: Path) -> Path:
    """Copy the package into ``site``, as an installer lays it out."""
    shutil.copytree(ROOT / "tkbuild", site / "tkbuild", ignore=shutil.ignore_patterns("__pycache__", "*.cc", "*.h"))
    return site


def test_read_only_install_stays_as_it_was(tmp_path: Path) -> None:
    site = install(tmp_path / "site")
    write_provider(site / "kernels", cast_signature())
    folders = [site, *(path for path in site.rglob("*") if path.is_dir())]
    before = tree(site)
    for path in (*site.rglob("*"), site):
        path.chmod(0o555 if path.is_dir() else 0o444)
    code = """
        import tkbuild.ops, tkbuild.runtime
        from tkbuild.runtime.__main__ import main
        print(main(["list", "quant.*"]), main(["require", "quant.*"]))
    """
    try:
        # No bytecode: root, as whom tests may run, writes it past the modes.
        env = {"TKBUILD_KERNELS": str(site / "kernels"), "PYTHONPATH": str(site), "PYTHONDONTWRITEBYTECODE": "1"}
        found = lines(code, **env)
        assert tree(site) == before
    finally:
        for folder in folders:
            folder.chmod(0o755)
    assert len(found) == 8 + 2
    assert found[-1] == "0 0"


def tree(root: Path) -> dict[str, bytes | None]:
    return {str(path.relative_to(root)): path.read_bytes() if path.is_file() else None for path in root.rglob("*")}


def test_closed_or_full_stdout_ends_quietly(kernels: Path) -> None:
    command = [sys.executable, "-W", "ignore", "-m", "tkbuild.runtime", "list"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TKBUILD_KERNELS": str(kernels)}
    reader, writer = os.pipe()
    os.close(reader)
    for stdout in (writer, os.open("/dev/full", os.O_WRONLY)):
        done = subprocess.run(command, env=environment, stdout=stdout, stderr=subprocess.PIPE, timeout=120, check=False)
        os.close(stdout)
        assert (done.returncode, done.stderr) == (1, b"")


def test_driver_is_missed_only_when_it_is_needed(kernels: Path) -> None:
    code = """
        import tkbuild.runtime
        from tkbuild.errors import DriverNotFoundError
        print(len(tkbuild.runtime.require("quant.*").found["quant.*"]))
        from tkbuild.runtime.launcher import native
        try:
            native().device_count()
            print("a driver is here")
        except DriverNotFoundError as exc:
            print("missed", len(str(exc).splitlines()))
    """
    found = lines(code, TKBUILD_KERNELS=str(kernels))
    assert found[0] == "8"
    assert found[1] in ("missed 1", "a driver is here")

"""cli: what is printed, and with which code it ends, for everything that needs no toolchain and no GPU."""

from __future__ import annotations

import importlib.util
import json
import shlex
import subprocess
import sys
import warnings
import zipfile
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from fake_build import FACTS, TILELANG, request, use_fake_worker
from fake_toolkit import FakeToolkit
from spec_text import SPEC, TEMPLATE, changed, write_spec

from tkbuild import cli, toolchain
from tkbuild.build import BuildEvent
from tkbuild.cli import compile as cli_compile
from tkbuild.cli import compiling, gpu, show
from tkbuild.cli.compiling import PlainReporter
from tkbuild.errors import ArgumentError
from tkbuild.manifest import CHECKS_NAME
from tkbuild.plan import make_plan
from tkbuild.specs import load_profiles
from tkbuild.verify import CaseFailure, VariantReport
from tkbuild.versions import TKBUILD_VERSION

VARIANT = "quant.cast-bf16-b32-f32-packed0-e64-sm_90a"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    specs = tmp_path / "kernel_specs"
    (specs / "profiles").mkdir(parents=True)
    (specs / "profiles/default.yaml").write_text("profile: default\nkernels: ['*']\n")
    write_spec(specs)
    return specs


def ended(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    """Run the command line as a process would; return its exit code."""
    monkeypatch.setattr(sys, "argv", ["tkbuild", *map(str, arguments)])
    with pytest.raises(SystemExit) as caught:
        cli.run()
    return int(str(caught.value.code))


def output(*arguments: object) -> str:
    result = CliRunner().invoke(cli.main, list(map(str, arguments)), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def test_help_names_every_command_and_imports_none() -> None:
    code = (
        "import sys; from click.testing import CliRunner; from tkbuild.cli import COMMANDS, main\n"
        "text = CliRunner().invoke(main, ['--help']).output\n"
        "print([c for c in COMMANDS if c not in text], [m for m in sys.modules if m.startswith('tkbuild.cli.')])\n"
    )
    finished = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert finished.stdout == "[] []\n"


def test_every_command_has_help_and_json() -> None:
    for command in cli.COMMANDS:
        if command not in ("verify", "bench"):
            assert "--json" in output(command, "--help")


def test_list(folder: Path) -> None:
    lines = output("list", "--specs", folder, "--arch", "sm_90a").splitlines()
    assert VARIANT in lines
    assert len(lines) == len(set(lines)) == 36
    first = json.loads(output("list", "--specs", folder, "--json").splitlines()[0])
    assert (first["id"], first["arch"], first["axes"]["block"]) == (VARIANT, "sm_90a", 32)


def test_explain_source(folder: Path) -> None:
    text = output("explain", VARIANT, "--specs", folder, "--source")
    assert "THREADS, ROWS, VECTOR = 128, 4, 16" in text
    assert json.loads(output("explain", VARIANT, "--specs", folder, "--source", "--json")) == {"source": text}


def test_schema() -> None:
    lines = output("schema", "--json").splitlines()
    assert len(lines) == 1
    assert json.loads(lines[0]) == json.loads(output("schema"))


def test_init_starts_a_project_that_lists(tmp_path: Path) -> None:
    made = json.loads(output("init", tmp_path / "mine", "--json"))
    assert all((tmp_path / "mine" / name).is_file() for name in made["files"])
    assert "mine.scale-f32-sm_100a" in output("list", "--specs", tmp_path / "mine/kernel_specs").splitlines()


@pytest.mark.toolchain
def test_a_part_of_a_project_becomes_a_wheel_that_answers_for_no_profile(tmp_path: Path) -> None:
    output("init", tmp_path / "Our_Kernels")
    chosen = [
        "mine.scale-f32-*",
        "--arch",
        "sm_90a",
        "--specs",
        tmp_path / "Our_Kernels/kernel_specs",
        "--store",
        tmp_path / "store",
    ]
    output("compile", *chosen)
    made = json.loads(output("package", *chosen, "--out", tmp_path / "dist", "--json"))
    # Not the name of tkbuild's own wheels, which an installation would replace.
    assert Path(made["wheel"]).name == f"our_kernels_sm90a-{TKBUILD_VERSION}.dev0+partial-py3-none-any.whl"
    with zipfile.ZipFile(made["wheel"]) as wheel:
        manifest, checks = (json.loads(wheel.read(f"our_kernels_sm90a/{name}")) for name in ("manifest.json", CHECKS_NAME))
    assert [variant["id"] for variant in manifest["variants"]] == ["mine.scale-f32-sm_90a"]
    assert checks["profiles"] == {}


@pytest.mark.parametrize(("folder", "wheel"), [("scale", "scale"), ("tkbuild-kernels", "my-tkbuild-kernels"), ("1 x", "my-1-x")])
def test_init_names_the_wheels(folder: str, wheel: str, tmp_path: Path) -> None:
    assert f"`cd {shlex.quote(str(tmp_path / folder))} && tkbuild compile" in output("init", tmp_path / folder)
    assert load_profiles(tmp_path / folder / "kernel_specs")["default"].wheel == wheel


FAILURES = [
    # (arguments after --specs FOLDER where there is one, exit code, name, telling part of the message)
    (["list", "--profile", "nope"], 2, "SpecError", "no profile 'nope'"),
    (["explain", VARIANT.replace("sm_90a", "sm_100a"), "--source"], 3, "RenderError", "'threds'"),
    (["list", "--arch", "sm_90"], 12, "ArgumentError", "did you mean sm_90a?"),
    (["list", "--arch", "sm90a"], 12, "ArgumentError", "sm_90a"),
    (["list", "nothing.*"], 14, "PatternError", "selects nothing"),
    (["list", "--nope"], 12, "NoSuchOption", "--nope"),
    (["explain"], 12, "MissingParameter", "VARIANT"),
    (["nope"], 12, "UsageError", "nope"),
    (["complie"], 12, "UsageError", "did you mean 'compile'?"),
    (["compile", "--remote", "s3//bucket"], 15, "StoreError", "no URL"),
]


@pytest.mark.parametrize(("arguments", "code", "name", "telling"), FAILURES)
@pytest.mark.parametrize("as_json", [False, True])
def test_failures_have_a_code_and_a_text(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    code: int,
    name: str,
    telling: str,
    as_json: bool,
) -> None:
    (folder / "bad.py.j2").write_text(TEMPLATE + "{{ threds | default(1) }}\n")
    (folder / "cast.yaml").write_text(changed("sm_100a: {", "sm_100a: {template: bad.py.j2, "))
    monkeypatch.setenv("TKBUILD_SPECS", str(folder))
    assert ended(monkeypatch, *arguments, *(["--json"] if as_json else [])) == code
    out, err = capsys.readouterr()
    assert telling in err
    assert "Traceback" not in err
    if not as_json:
        assert out == ""
        return
    (line,) = out.splitlines()
    error = json.loads(line)
    assert set(error) == {"error", "message", "exit_code"}
    assert error["exit_code"] == code
    assert name in error["error"] or name == "UsageError"
    assert telling in error["message"]


def test_wrong_specs_are_listed(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "cast.yaml").write_text(SPEC.replace("spec: 1", "spec: 2"))
    assert ended(monkeypatch, "list", "--specs", folder) == 2
    assert f"{folder}/cast.yaml:1:7: spec: expected 1" in capsys.readouterr().err


@pytest.mark.parametrize("place", ["file", "file/inside", "full"])
def test_init_where_it_cannot_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], place: str
) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "full").mkdir()
    (tmp_path / "full/README.md").touch()
    assert ended(monkeypatch, "init", tmp_path / place) == 12
    assert "name a" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["verify", "bench"])
def test_without_torch_the_gpu_commands_say_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert ended(monkeypatch, command, "--json") == 20
    out, err = capsys.readouterr()
    assert json.loads(out)["exit_code"] == 20
    assert "pip install 'torch" in err


def test_an_interrupt(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(*_arguments: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(show, "selected", interrupted)
    assert ended(monkeypatch, "list", "--specs", folder, "--json") == 130
    out, err = capsys.readouterr()
    assert json.loads(out)["exit_code"] == 130
    assert err.strip() == "error: interrupted", "nothing was put in the store"


# ---- what compile says of its progress


def event(kind: str, finished: int = 0, variants: tuple[str, ...] = ("a",)) -> BuildEvent:
    return BuildEvent(kind, variants, 1.25, finished, 6)


def test_plain_progress_begins_at_once_and_is_not_chatty(capsys: pytest.CaptureFixture[str]) -> None:
    clock = [0.0]
    report = PlainReporter(lambda: clock[0])
    for seconds, one in (
        (0.0, event("hit", 1)),
        (0.0, event("started", 1)),
        (0.1, event("started", 1)),
        (9.0, event("lowered", 1, ("a", "b"))),
        (12.0, event("lowered", 1, ("c",))),
        (13.0, event("lowered", 1, ("d",))),
        (21.9, event("failed", 2, ("e",))),
        (22.1, event("lowered", 2, ("f",))),
        (30.0, event("compiled", 3)),
        (31.0, event("done", 3, ())),
    ):
        clock[0] = seconds
        report(one)
    assert capsys.readouterr().err.splitlines() == [
        "[1/6] 5 variants are not in the store; lowering begins",
        "[1/6] lowered 3 variants",
        "[2/6] failed e (1.2 s)",
        "[3/6] compiled a (1.2 s)",
    ]


def test_compile_without_a_terminal_tells_when_lowering_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    use_fake_worker(monkeypatch)
    plan = make_plan([request("a"), request("b")], FACTS)
    kit = FakeToolkit.create(tmp_path / "cuda")
    monkeypatch.setattr(toolchain, "find", lambda *_arguments: kit.toolchain())
    monkeypatch.setattr(toolchain, "find_tilelang", lambda: TILELANG)
    monkeypatch.setattr(cli_compile, "build_facts", lambda *_arguments: FACTS)
    monkeypatch.setattr(compiling, "selected", lambda *_arguments: [])
    monkeypatch.setattr(compiling, "planned", lambda *_arguments: plan)
    arguments = ("compile", "--store", tmp_path / "artifacts", "--jobs", 1)
    assert ended(monkeypatch, *arguments) == 0
    out, err = capsys.readouterr()
    first, *others = err.splitlines()
    assert first == "[0/2] 2 variants are not in the store; lowering begins"
    assert [line.split(" (")[0] for line in others] == ["[1/2] compiled t.k-a-sm_90a", "[2/2] compiled t.k-b-sm_90a"]
    assert "2 variants ready, 0 of them from the store" in out
    assert ended(monkeypatch, *arguments) == 0
    assert capsys.readouterr().err == "", "nothing was lowered"
    assert ended(monkeypatch, *arguments, "--json") == 0
    assert [json.loads(line)["kind"] for line in capsys.readouterr().out.splitlines()] == ["hit", "hit", "done"]


def test_an_unchanged_build_is_not_planned_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    use_fake_worker(monkeypatch)
    kit, specs, planned = FakeToolkit.create(tmp_path / "cuda"), tmp_path / "specs", []
    store = specs / "artifacts"  # what a build writes is no part of what it is planned from
    specs.mkdir()
    (specs / "a.yaml").write_text("spec: 1")

    def plan(*_arguments: Any) -> Any:
        planned.append(len(planned))
        return make_plan([request("a"), request("b")], FACTS)

    monkeypatch.setattr(toolchain, "find", lambda *_arguments: kit.toolchain())
    monkeypatch.setattr(toolchain, "find_tilelang", lambda: TILELANG)
    monkeypatch.setattr(cli_compile, "build_facts", lambda *_arguments: FACTS)
    monkeypatch.setattr(compiling, "selected", lambda *_arguments: [])
    monkeypatch.setattr(compiling, "planned", plan)

    def compiled(*more: str) -> int:
        assert ended(monkeypatch, "compile", "--store", store, "--specs", specs, "--jobs", 1, *more) == 0
        assert "2 variants ready" in capsys.readouterr().out
        return len(planned)

    assert compiled() == 1
    assert compiled() == 1
    assert compiled("t.*") == 2, "another choice"
    (specs / "a.yaml").write_text("spec: 1 ")
    assert compiled() == 3, "another spec"
    assert compiled() == 3
    entry = next((store / "cubins").glob("*/*/kernel.cubin"))
    entry.write_bytes(b"damaged")
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        assert compiled() == 4, "a damaged entry is a miss"
    assert compiled() == 4


@pytest.mark.parametrize(
    ("cases", "failures", "text"),
    [
        (3, (), "t.k-a-sm_90a  ok, 3 cases"),
        (0, (), "t.k-a-sm_90a  DID NOT RUN: its spec has no reference, or no case that selects it; add one, or try --large"),
        (3, (CaseFailure({"T": 2}, "out differs"),), "t.k-a-sm_90a  WRONG in 1 of 3 cases (seed 7)\n    T=2\n    out differs"),
    ],
)
def test_what_verify_says_of_a_variant(cases: int, failures: tuple[CaseFailure, ...], text: str) -> None:
    report = VariantReport("t.k-a-sm_90a", "ab", "H200", "13.0", 7, cases, 1, failures)
    assert gpu.verify_line(report) == text
    assert report.is_verified == ("ok" in text) == (report.to_json()["state"] == "verified")


def test_warnings_are_one_line(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def warned(*_arguments: Any) -> list[Any]:
        warnings.warn("the store\nis damaged", UserWarning, stacklevel=1)
        return []

    monkeypatch.setattr(show, "selected", warned)
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        assert ended(monkeypatch, "list", "--specs", folder) == 0
    assert capsys.readouterr().err == "warning: the store is damaged\n"


@pytest.mark.parametrize(("redirected", "telling"), [("| true", ""), ("> /dev/full", "error: cannot write the output: ")])
@pytest.mark.parametrize("arguments", ["list", "list --json", "list --nope --json", "schema"])
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_an_output_that_takes_nothing_ends_the_command_quietly(
    folder: Path, redirected: str, telling: str, arguments: str, unbuffered: str
) -> None:
    command = f'sleep 0.1; "$0" -m tkbuild {arguments} {redirected}'
    env = {"TKBUILD_SPECS": str(folder), "PYTHONUNBUFFERED": unbuffered}
    finished = subprocess.run(["sh", "-c", command, sys.executable], capture_output=True, text=True, env=env, check=False)
    assert "Traceback" not in finished.stderr
    assert "Exception ignored" not in finished.stderr
    assert telling in finished.stderr


@pytest.mark.parametrize("content", ['{"arch":', "[]", '{"cubins": 3}'])
def test_a_file_that_is_no_report_is_refused_before_anything_runs(tmp_path: Path, content: str) -> None:
    path = tmp_path / "sm_90a.json"
    path.write_text(content)
    with pytest.raises(ArgumentError, match="is no report of `tkbuild verify`"):
        gpu._known_reports(path)
    assert path.read_text() == content
    assert gpu._known_reports(tmp_path / "new/sm_90a.json") == {}


def test_results_need_a_place(tmp_path: Path) -> None:
    kept = tmp_path / "kept.jsonl"
    kept.write_text("before")
    gpu._check_writable(kept)
    assert kept.read_text() == "before"
    with pytest.raises(ArgumentError, match="cannot write the results to"):
        gpu._check_writable(tmp_path / "no/results.jsonl")

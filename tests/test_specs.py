"""specs: a right spec is read whole; each thing that can be wrong is reported with place, key and what was expected."""

from __future__ import annotations

import errno
import os
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from spec_text import SPEC, changed, write_spec

from tkbuild import specs
from tkbuild.arch import TargetArch
from tkbuild.checks import Tolerance
from tkbuild.errors import SpecError
from tkbuild.kernelspec import KernelSpec
from tkbuild.schema import Map, Node, Report, Scalar, Sequence, scalar_value
from tkbuild.signature import KernelSignature
from tkbuild.speccheck import FILL_NAMES
from tkbuild.specs import json_schema, load_profile, load_profiles, load_spec, load_specs

REPOSITORY_SPECS = Path(__file__).parents[1] / "kernel_specs"


def refused(folder: Path, text: str) -> SpecError:
    with pytest.raises(SpecError) as caught:
        load_spec(write_spec(folder, text))
    return caught.value


def line_of(text: str, part: str) -> int:
    return text[: text.index(part)].count("\n") + 1


def test_a_right_spec_is_read_whole(tmp_path: Path) -> None:
    spec = load_spec(write_spec(tmp_path))
    assert (spec.name, spec.signature.op, spec.programmatic, spec.reference) == ("quant.cast", "cast_groups", "off", "quant.cast")
    assert list(spec.targets) == [TargetArch(9, 0, "a"), TargetArch(10, 0, "a")]
    assert spec.targets[TargetArch(9, 0, "a")].tuning == {"threads": 128, "rows": {"bf16": 2, "f32": 4}}
    assert spec.constants == {"batched": False, "lanes": (4, 8)}
    assert [path.name for path in spec.sources] == ["helpers.py"]
    assert (spec.allow.spill_bytes, spec.allow.stack_bytes) == (8, 0)
    assert spec.verify is not None
    assert spec.verify.tolerance == {"out": Tolerance(), "sf": Tolerance(atol=1e-6)}
    assert spec.bench is not None
    assert str(spec.bench.moved_bytes) == "bytes(x) + bytes(out) + bytes(sf)"
    assert [dim.name for dim in spec.signature.bound_dims] == ["T", "H", "ld", "E", "sf_row", "sf_col"]
    assert {scalar.name: scalar.default for scalar in spec.signature.scalars} == {"round_sf": 0, "eps": 1e-6}


@pytest.mark.parametrize(
    ("name", "module", "problem"),
    [
        ("references:scale", "def scale(x): ...", None),
        ("references:scale", "from elsewhere import other as scale", None),
        ("references:scale", "from elsewhere import *", None),
        ("references:scale", "if True:\n    scale = print", None),
        ("references:scal", "def scale(x): ...", r"references\.py has no scal; did you mean scale\?"),
        ("references:scale", "def scale(x:", r"references\.py:1: '\(' was never closed"),
        ("referenc:scale", "def scale(x): ...", r"no module referenc; did you mean that in .*references\.py\?"),
        ("elsewhere:scale", "def other(x): ...", None),
        ("json:scale", "def other(x): ...", None),
    ],
)
def test_references_of_ones_own_are_looked_for_in_the_project(tmp_path: Path, name: str, module: str, problem: str | None) -> None:
    (tmp_path / "references.py").write_text(module)
    (tmp_path / "kernel_specs/quant").mkdir(parents=True)
    text = changed("reference: quant.cast", f"reference: {name}")
    if problem is None:
        assert load_spec(write_spec(tmp_path / "kernel_specs/quant", text)).reference == name
    else:
        with pytest.raises(SpecError, match=f"reference: .*{problem}"):
            load_spec(write_spec(tmp_path / "kernel_specs/quant", text))


def test_cases_multiply_and_compute_and_pick_their_variants(tmp_path: Path) -> None:
    spec = load_spec(write_spec(tmp_path))
    assert spec.verify is not None
    (case,) = spec.verify.cases
    calls = list(case.calls({"block": 64, "in_dtype": "float32"}))
    assert len(calls) == 2 * 2 * 2 * 2
    assert {call["ld"] for call in calls} == {576, 640, 7168, 7232}
    assert list(case.calls({"block": 128})) == []
    text = changed("why: tail, T: [1, 31]", "why: tail, large: true, inputs: {x: 'uniform(-1, 1)'}, T: [1, 31]")
    verify = load_spec(write_spec(tmp_path, text)).verify
    assert verify is not None
    assert (verify.cases[0].large, verify.cases[0].inputs) == (True, {"x": "uniform(-1, 1)"})


def test_small_templates_and_defaults(tmp_path: Path) -> None:
    text = (
        "spec: 1\nkernel: a.cast\nsummary: s\nargs: {x: {role: inout, dtype: int8, shape: [N]}}\n"
        "targets:\n  sm_90a:\n  sm_120a: {template: other.py.j2, depth: 2}\n"
    )
    (tmp_path / "other.py.j2").touch()
    spec = load_spec(write_spec(tmp_path, text))
    first, second = spec.targets.values()
    assert (first.template.name, first.tuning) == ("cast.py.j2", {})
    assert (second.template.name, second.tuning) == ("other.py.j2", {"depth": 2})
    assert (spec.signature.op, spec.verify, spec.bench, list(spec.combinations())) == ("a_cast", None, None, [{}])


WRONG = [
    # (what is replaced, by what, key path, telling part of the message)
    ("kernel: quant.cast", "kernel: quant.other", "kernel", "expected family.cast"),
    ("kernel: quant.cast", "kernel: quant-cast", "kernel", "without '-'"),
    ("kernel: quant.cast", "kernal: quant.cast", "kernal", "did you mean kernel?"),
    ("kernel: quant.cast", "Kernel: quant.cast", "Kernel", "did you mean kernel?"),
    ("summary: Quantise groups of each row.", "summary: 5", "summary", "found the number 5; put text in quotes"),
    ("spec: 1", "spec: 2", "spec", "expected 1, found the number 2"),
    ("spec: 1", "spec: '1'", "spec", "remove the quotes"),
    ("values: [32, 64, 128]", "values: [32, 064, 128]", "axes.block.values[1]", "064 is not read the same way"),
    ("values: [32, 64, 128]", "values: [32, 1:30]", "axes.block.values[1]", "1:30 is not read the same way"),
    ("values: [32, 64, 128]", "values: [32, 1_000]", "axes.block.values[1]", "1_000 is not read the same way"),
    ("values: [32, 64, 128]", "values: [32, 0o17]", "axes.block.values[1]", "0o17 is not read the same way"),
    ("values: [32, 64, 128]", "values: [32, '64']", "axes.block.values[1]", "remove the quotes"),
    ("values: [32, 64, 128]", "values: [32, 64.0]", "axes.block.values[1]", "expected a value of type int"),
    ("values: [32, 64, 128]", "values: [32, true]", "axes.block.values[1]", "expected a value of type int"),
    ("values: [32, 64, 128]", "values: [32, -64]", "axes.block.values[1]", "negative"),
    ("values: [32, 64, 128]", "values: [32, 100000000000000000000000000]", "axes.block.values[1]", "64 bits"),
    ("values: [32, 64, 128]", "values: [32, 32]", "axes.block.values[1]", "given twice"),
    ("values: [32, 64, 128]", "values: []", "axes.block.values", "at least 1"),
    ("values: [32, 64, 128]", "values: 32", "axes.block.values", "expected a list, found the number 32"),
    ("values: [f32, ue8m0]", "values: [f32, no]", "axes.sf_format.values[1]", "write true or false"),
    ("values: [f32, ue8m0]", "values: [f32, a-b]", "axes.sf_format.values[1]", "part of variant ids"),
    ("values: [false, true]", "values: [false, 'true']", "axes.packed.values[1]", "remove the quotes"),
    ("values: [false, true]", "values: [false, yes]", "axes.packed.values[1]", "write true or false"),
    ("values: [bfloat16, float32]", "values: [bf16]", "axes.in_dtype.values[0]", "did you mean bfloat16?"),
    ("rule: at_least", "rule: atleast", "axes.cap.choose.rule", "did you mean at_least?"),
    ("[64, 256], choose: {rule: at_least", "[0, 64], choose: {rule: divides", "axes.cap.choose.rule", "0 divides nothing"),
    ("of: E}", "of: EE}", "axes.cap.choose.of", "unknown name 'EE' (did you mean E?)"),
    ("packed == 0 or sf_format == 'ue8m0'", "packd == 0", "constraints[0].require", "did you mean packed?"),
    ("packed == 0 or sf_format == 'ue8m0'", "T > 0", "constraints[0].require", "unknown name 'T'"),
    ("packed == 0 or sf_format == 'ue8m0'", "in_dtype == 'bf16'", "constraints[0].require", "did you mean bfloat16?"),
    ("packed == 0 or sf_format == 'ue8m0'", "in_dtype > 1", "constraints[0].require", "compare it with == or !="),
    ("packed == 0 or sf_format == 'ue8m0'", "block // packed", "constraints[0].require", "division by zero"),
    ("packed == 0 or sf_format == 'ue8m0'", "block > 128", "constraints", "no combination"),
    ("role: in, dtype: in_dtype", "role: input, dtype: in_dtype", "args.x.role", "one of in, out, inout, workspace"),
    ("dtype: in_dtype", "dtype: in_dtyp", "args.x.dtype", "did you mean in_dtype?"),
    ("dtype: in_dtype", "dtype: block", "args.x.dtype", "axis of type int"),
    ("dtype: in_dtype", "dtype: float4_e2m1fn", "args.x.dtype", "which one carries it"),
    ("{f32: float32, ue8m0: int32}", "{f32: float32}", "args.sf.dtype.map", "no dtype for the value ue8m0"),
    ("{f32: float32, ue8m0: int32}", "{f32: float32, ue8m1: int32}", "args.sf.dtype.map.ue8m1", "did you mean ue8m0?"),
    ("strides: [ld, 1], align: 16", "strides: [ld], align: 16", "args.x.strides", "expected 2 strides"),
    ("strides: [ld, 1], align: 16", "strides: [1099511627776, 1]", "args.x.strides[0]", "constant from 1 to 2147483647"),
    ("strides: [ld, 1], align: 16", "strides: [0, 1]", "args.x.strides[0]", "constant from 1 to"),
    ("strides: [ld, 1], align: 16", "strides: [-8, 1]", "args.x.strides[0]", "constant from 1 to"),
    ("strides: [ld, 1], align: 16", f"strides: [1{'0' * 26}, 1]", "args.x.strides[0]", "64 bits"),
    ("strides: [ld, 1], align: 16", "strides: [ld, 1], align: 24", "args.x.align", "power of two"),
    ("shape: [E]", "shape: [E / 2]", "args.w.shape[0]", "division is //"),
    ("shape: [E]", "shape: [1e3]", "args.w.shape[0]", "expected an expression"),
    ("float8_e4m3fn, shape: [T, H]", "float8_e4m3fn, shape: [T, K]", "args.out.shape[1]", "unknown name 'K'"),
    ("float8_e4m3fn, shape: [T, H]", "float8_e4m3fn, shape: [T, sf_row]", "args.out.shape[1]", "bound by no shape"),
    ('elems: "T * ceildiv(H, block)"', 'elems: "T * sf_row"', "args.sf.alloc.elems", "unknown name 'sf_row'"),
    ("{dtype: float32, default: 1e-6}", "{dtype: float32, default: '1e-6'}", "scalars.eps.default", "remove the quotes"),
    ("{dtype: float32, default: 1e-6}", "{dtype: float32, default: .inf}", "scalars.eps.default", ".inf is not read the same"),
    ("{dtype: float32, default: 1e-6}", "{dtype: float32, default: inf}", "scalars.eps.default", "inf is not read the same"),
    ("{dtype: float32, default: 1e-6}", "{dtype: float32, default: .nan}", "scalars.eps.default", ".nan is not read the same"),
    ("{dtype: float32, default: 1e-6}", "{dtype: float32, default: 1e400}", "scalars.eps.default", "beyond the range"),
    ("{dtype: int32, default: 0,", "{dtype: int32, default: 2147483648,", "scalars.round_sf.default", "type int32"),
    ("{dtype: int32, default: 0,", "{dtype: bfloat16, default: 0,", "scalars.round_sf.dtype", "one of int32"),
    ("{dtype: bool, default: false}", "{dtype: bool, default: 'false'}", "options.col_major.default", "remove the quotes"),
    ("{dtype: bool, default: false}", "{dtype: bool, default: off}", "options.col_major.default", "write true or false"),
    ("T: {max: 2147483647}", "T: 4096", "dims.T", "use an axis for a compile-time value"),
    ("T: {max: 2147483647}", "TT: {max: 1}", "dims.TT", "did you mean T?"),
    ("T: {max: 2147483647}", "T: {min: 5, max: 4}", "dims.T", "min 5 is above max 4"),
    ('"H % block == 0"', '"eps > 0"', "checks[0].require", "'eps' is a float"),
    ('"H % block == 0"', '"bytes(x) > 0"', "checks[0].require", "in bench only"),
    ("programmatic: off", "programmatic: maybe", "launch.programmatic", "one of off, setting, on"),
    ("sm_90a: {", "sm_90: {", "targets.sm_90", "did you mean sm_90a?"),
    ("sm_90a: {", "sm90a: {", "targets.sm90a", "expected an arch such as sm_90a"),
    ("sm_90a: {", "90: {", "targets.90", "expected an arch such as sm_90a"),
    ("sm_90a: {threads: 128", "sm_90a: {template: lost.py.j2", "targets.sm_90a.template", "no file lost.py.j2"),
    ("sources: [helpers.py]", "sources: [helper.py]", "sources[0]", "did you mean helpers.py?"),
    ("sources: [helpers.py]", "sources: [../helpers.py]", "sources[0]", "beside the spec"),
    ("constants: {batched: false", "constants: {block: false", "axes.block", "already a name in constants"),
    ("constants: {batched: false", "constants: {tuning: false", "constants.tuning", "reserved"),
    ("constants: {batched: false", "constants: {'batched ': false", "constants.batched ", "letters, digits"),
    ('"-Xptxas=-O3"', '"-arch=sm_90"', "compile_flags[0]", "chooses the target, which `targets` does; allowed: flags about"),
    ('"-Xptxas=-O3"', '"-DA", "-lineinfo"', "compile_flags[1]", "'-lineinfo' is refused: it adds line or debug information"),
    ('"-Xptxas=-O3"', '"-include=a.cuh"', "compile_flags[0]", "it names files that no key covers; list a file"),
    ("tl.disable_warp_specialized: true", "tl.device_compile_flags: -DA a.cu", "pass_configs.tl.device_compile_flags", "'a.cu' is"),
    ("tl.disable_warp_specialized: true", "tl.device_compile_flags: 5", "pass_configs.tl.device_compile_flags", "expected text"),
    ("tl.disable_warp_specialized: true", "tl.ptxas_register_usage_level: a", "pass_configs.tl.ptxas_register_usage_level", "whole"),
    ('"-Xptxas=-O3"', '"O3"', "compile_flags[0]", "starts with '-'"),
    ("reference: quant.cast\n", "", "verify", "reference"),
    ("reference: quant.cast", "reference: cast", "reference", "family.function"),
    ("reference: quant.cast", "reference: quant.casst", "reference", "did you mean quant.cast"),
    ("reference: quant.cast", "reference: nothing.cast", "reference", "a function of your own is module:function"),
    ("tolerance: {out: exact", "tolerance: {x: exact", "verify.tolerance.x", "no out or inout tensor"),
    ("tolerance: {out: exact", "tolerance: {out: exakt", "verify.tolerance.out", "did you mean exact?"),
    ("inputs: {x: normal}", "inputs: {y: normal}", "verify.inputs.y", "no in or inout"),
    ("round_sf: [0, 1]", "rnd_sf: [0, 1]", "verify.cases[0].rnd_sf", "did you mean round_sf?"),
    ("round_sf: [0, 1]", "round_sf: [0, x]", "verify.cases[0].round_sf", "unknown name 'x'"),
    ("block: [32, 64]}", "block: [32, 48]}", "verify.cases[0].block", "no value of the axis"),
    ("why: tail, T: [1, 31]", "why: tail", "verify.cases[0]", "no value for the dimension 'T'"),
    ("why: tail, T: [1, 31]", "why: tail, large: 1, T: [1, 31]", "verify.cases[0].large", "true or false"),
    ("why: tail, T: [1, 31]", "why: tail, inputs: {z: normal}, T: [1, 31]", "verify.cases[0].inputs.z", "known: x, w"),
    ("inputs: {x: normal}", "inputs: {ws: zeros}", "verify.inputs.ws", "no in or inout tensor"),
    ("inputs: {x: normal}", "inputs: {x: 5}", "verify.inputs.x", "a fill such as normal"),
    ("inputs: {x: normal}", "inputs: {x: nromal}", "verify.inputs.x", "unknown fill 'nromal' (did you mean normal?)"),
    ("why: tail, T: [1, 31]", "why: tail, inputs: {x: unifrm(0)}, T: [1, 31]", "verify.cases[0].inputs.x", "did you mean uniform?"),
    ("constants: {batched: false", "constants: {batched: 'false'", "constants.batched", "write false without quotes"),
    ("lanes: [4, 8]", "lanes: [4, 'True']", "constants.lanes[1]", "write true without quotes"),
    ("sm_90a: {threads: 128", "sm_90a: {fast: 'true', threads: 128", "targets.sm_90a.fast", "write true without quotes"),
    ('"H % block == 0"', '"H % 0 == 0"', "checks[0].require", "H % 0 divides by zero"),
    ('"H % block == 0"', '"ceildiv(H, 4 - 4) == 0"', "checks[0].require", "ceildiv(H, 4 - 4) divides by zero"),
    ("packed == 0 or sf_format == 'ue8m0'", "packed == 0 or block // 0 == 1", "constraints[0].require", "block // 0 divides"),
    ("sources: [helpers.py]", f"sources: [{'h' * 300}]", "sources[0]", "File name too long"),
    ("source: own method", f"template: {'h' * 300}", "template", "File name too long"),
    ("sm_90a: {threads: 128", f"sm_90a: {{template: {'h' * 300}", "targets.sm_90a.template", "File name too long"),
    ("bytes(x) + bytes(out)", "bytes(x) + bytes(outt)", "bench.bytes", "no such argument"),
]  # fmt: skip


@pytest.mark.parametrize(("old", "new", "at", "telling"), WRONG)
def test_what_is_wrong_is_named_with_its_place(tmp_path: Path, old: str, new: str, at: str, telling: str) -> None:
    text = changed(old, new)
    problems = [problem for problem in refused(tmp_path, text).problems if problem.at == at]
    assert any(telling in problem.message for problem in problems), refused(tmp_path, text)
    lines = text.splitlines()
    assert all(1 <= problem.line <= len(lines) and 1 <= problem.column <= len(lines[problem.line - 1]) + 1 for problem in problems)


def test_positions_are_those_of_the_value(tmp_path: Path) -> None:
    text = changed("values: [32, 64, 128]", "values: [32, 064, 128]")
    (problem,) = refused(tmp_path, text).problems
    assert problem.line == line_of(text, "064")
    assert text.splitlines()[problem.line - 1][problem.column - 1 :].startswith("064")
    assert str(problem).startswith(f"{tmp_path / 'cast.yaml'}:{problem.line}:{problem.column}: axes.block.values[1]: ")


def test_refused_flag_is_reported_with_file_key_flag_and_what_is_allowed(tmp_path: Path) -> None:
    text = changed('"-Xptxas=-O3"', '"-lineinfo"')
    (line,) = str(refused(tmp_path, text)).splitlines()
    place = f"{tmp_path / 'cast.yaml'}:{line_of(text, '-lineinfo')}:17: compile_flags[0]: compile flag '-lineinfo' is refused: "
    assert line.startswith(place)
    assert "allowed: flags about how the code itself is compiled, such as -DNAME=1, -maxrregcount=64, -Xptxas=-O3" in line


def test_all_problems_of_a_file_come_together(tmp_path: Path) -> None:
    text = changed("spec: 1\n", "")
    text = changed("sm_100a: {threads: 256", "sm_101a: {threads: 256", text)
    text = changed("summary: Quantise groups of each row.", "sumary: x", text)
    text = changed('"H % block == 0"', '"HH % block == 0"', text)
    text = changed("role: in, dtype: in_dtype", "role: in, dtype: in_dtpe", text)
    at = [problem.at for problem in refused(tmp_path, text).problems]
    assert at == ["", "", "sumary", "args.x.dtype", "checks[0].require", "targets.sm_101a"]


@pytest.mark.parametrize("eps", ["1e-6", "1E-6", "1.0e-6", ".000001", "0.000001", "+1e-6"])
def test_one_number_has_many_spellings(tmp_path: Path, eps: str) -> None:
    spec = load_spec(write_spec(tmp_path, changed("default: 1e-6", f"default: {eps}")))
    assert {scalar.name: scalar.default for scalar in spec.signature.scalars}["eps"] == 1e-6


@pytest.mark.parametrize(("text", "value"), [("0x40", 64), ("+64", 64), ("0", 0)])
def test_integers(tmp_path: Path, text: str, value: int) -> None:
    spec = load_spec(write_spec(tmp_path, changed("values: [32, 64, 128]", f"values: [32, {text}]").replace("[32, 64]}", "[32]}")))
    assert spec.signature.axes[1].values == (32, value)


def test_on_and_off_are_words_where_words_are_expected(tmp_path: Path) -> None:
    assert load_spec(write_spec(tmp_path, changed("programmatic: off", "programmatic: on"))).programmatic == "on"


def test_names_that_old_readers_take_for_truth_values(tmp_path: Path) -> None:
    text = "spec: 1\nkernel: a.cast\nsummary: s\nargs: {y: {role: inout, dtype: int8, shape: [N, n, Y]}}\ntargets: {sm_90a: {}}\n"
    spec = load_spec(write_spec(tmp_path, text))
    assert [dim.name for dim in spec.signature.bound_dims] == ["N", "n", "Y"]


# ---- YAML itself


@pytest.mark.parametrize(
    ("old", "new", "key", "first"),
    [
        ("op: {name: cast_groups}", "op: {name: cast_groups}\nkernel: quant.cast", "kernel", "kernel: quant.cast"),
        ("op: {name: cast_groups}", "op: {name: a, name: b}", "name", "op: {name"),
        ("dims: {T:", "dims: {T: {max: 1}, T:", "T", "dims: {T:"),
    ],
)
def test_duplicate_keys_are_refused_with_both_lines(tmp_path: Path, old: str, new: str, key: str, first: str) -> None:
    text = changed(old, new)
    problems = refused(tmp_path, text).problems
    assert any(f"the key {key!r} is given twice; first in line {line_of(text, first)}" == problem.message for problem in problems)


def test_anchors_and_merge_keys_work_and_the_own_key_wins(tmp_path: Path) -> None:
    text = changed("sm_90a: {threads: 128,", "sm_90a: &base {threads: 128,")
    text = changed("sm_100a: {threads: 256, rows: {bf16: 2, f32: 4}}", "sm_100a: {threads: 256, <<: *base}", text)
    spec = load_spec(write_spec(tmp_path, text))
    assert spec.targets[TargetArch(10, 0, "a")].tuning == {"threads": 256, "rows": {"bf16": 2, "f32": 4}}


def test_the_first_of_several_merged_mappings_wins(tmp_path: Path) -> None:
    text = changed("constants: {batched: false, lanes: [4, 8]}", "constants: {<<: [&a {p: 1}, &b {p: 2, q: 3}], q: 4}")
    assert load_spec(write_spec(tmp_path, text)).constants == {"q": 4, "p": 1}


BOMB = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 30)
)


@pytest.mark.parametrize(
    ("text", "telling"),
    [
        (BOMB, "aliases counted in full"),
        ("[" * 5000, "deep|nesting"),
        ("{a: " * 5000, "deep|nesting"),
        ("- " * 5000, "deep"),
        ("a: &a [*a]", "refers to no anchor"),
        ("a: *nothing", "undefined alias|refers to no anchor"),
        ("a: !!python/object/apply:os.system [echo]", "tag"),
        ("a: !!int '5'", "tag"),
        ("a: !thing 5", "tag"),
        ("--- 1\n--- 2\n", "second document"),
        ("", "is empty"),
        ("# nothing\n", "is empty"),
        ("a: [1, 2", "no YAML"),
        ("a: 'open", "no YAML"),
        ("a: b: c", "no YAML"),
        ("\ta: 1", "no YAML"),
        ("a: \x07", "not allowed"),
        ("[1]: 2", "must be a single value"),
        ("<<: 5", "merges a mapping"),
        ("5", "expected a mapping, found the number 5"),
        ("[1]", "expected a mapping, found a list"),
    ],
)  # fmt: skip
def test_documents_that_are_no_specs(tmp_path: Path, text: str, telling: str) -> None:
    message = str(refused(tmp_path, text))
    assert any(part in message for part in telling.split("|")), message


def test_bytes_that_are_no_text(tmp_path: Path) -> None:
    path = write_spec(tmp_path)
    path.write_bytes(b"spec: 1\nkernel: \xff\xfe\n")
    with pytest.raises(SpecError, match=r"cast.yaml:2:1: is not UTF-8"):
        load_spec(path)
    path.write_bytes(b"\xef\xbb\xbf" + SPEC.encode())
    assert load_spec(path).name == "quant.cast"
    path.write_bytes(b"#" * 2_000_000)
    with pytest.raises(SpecError, match="2000000 bytes"):
        load_spec(path)


def test_files_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="cannot be read"):
        load_spec(tmp_path / "lost.yaml")
    with pytest.raises(SpecError, match="no such folder"):
        load_specs(tmp_path / "lost")
    with pytest.raises(SpecError, match="no kernel spec"):
        load_specs(tmp_path)


LINES = SPEC.splitlines(keepends=True)
TOKENS = [
    "[",
    "]",
    "{",
    "}",
    ":",
    ", ",
    "- ",
    "&a ",
    "*a",
    "!!int ",
    "'",
    '"',
    "\n",
    "  ",
    "null",
    "1e-6",
    "010",
    "yes",
    "<<: ",
    "#",
    "|",
    ">",
    "? ",
]


@given(seed=st.integers(0, 2**32))
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_mutated_specs_are_read_or_refused_but_never_break(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    text = mutated(rng)
    try:
        spec = load_spec(write_spec(tmp_path, text))
    except SpecError as error:
        assert error.problems
        return
    assert KernelSignature.from_json(spec.name, spec.signature.to_json()) == spec.signature


def mutated(rng: random.Random) -> str:
    lines = list(LINES)
    for _ in range(rng.randint(1, 3)):
        i = rng.randrange(len(lines))
        how = rng.randrange(5)
        if how == 0:
            del lines[i]
        elif how == 1:
            lines.insert(rng.randrange(len(lines)), lines[i])
        else:
            at = rng.randrange(len(lines[i]))
            lines[i] = lines[i][:at] + rng.choice(TOKENS) + lines[i][at + (how == 2) :]
    return "".join(lines)


# ---- folders, profiles, JSON Schema


def test_a_kernel_is_described_once(tmp_path: Path) -> None:
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        write_spec(tmp_path / folder)
    with pytest.raises(SpecError, match=r"two/cast.yaml:2:\d+: kernel: quant.cast is already described by .*one/cast.yaml"):
        load_specs(tmp_path)


def test_problems_of_all_files_come_together(tmp_path: Path) -> None:
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        write_spec(tmp_path / folder, changed("spec: 1", "spec: 3"))
    with pytest.raises(SpecError) as caught:
        load_specs(tmp_path)
    assert len(caught.value.problems) == 2


def test_profiles(tmp_path: Path) -> None:
    (tmp_path / "profiles").mkdir()
    path = tmp_path / "profiles" / "small.yaml"
    path.write_text("profile: small\nkernels: [quant.*]\naxes: {quant.cast: {block: [32], packed: [true]}}\n")
    write_spec(tmp_path)
    assert list(load_specs(tmp_path)) == ["quant.cast"]
    profile = load_profiles(tmp_path)["small"]
    assert (profile.kernels, profile.axes) == (("quant.*",), {"quant.cast": {"block": (32,), "packed": (True,)}})
    path.write_text("profile: other\nkernels: []\naxes: {quant.cast: {block: 32}}\n")
    with pytest.raises(SpecError) as caught:
        load_profile(path)
    assert {problem.at for problem in caught.value.problems} == {"kernels", "axes.quant.cast.block"}


def test_the_profiles_of_this_project_load() -> None:
    assert {"default", "full"} <= load_profiles(REPOSITORY_SPECS).keys()


def test_the_specs_of_this_project_load_and_their_signatures_travel() -> None:
    for spec in load_specs(REPOSITORY_SPECS).values():
        assert isinstance(spec, KernelSpec)
        assert KernelSignature.from_json(spec.name, spec.signature.to_json()) == spec.signature


def as_plain(node: Node) -> Any:
    """What a JSON Schema validator is given: the tree as lists, dicts and scalars; words such as off stay words."""
    if isinstance(node, Map):
        return {key: as_plain(value) for key, value in node.entries.items()}
    if isinstance(node, Sequence):
        return [as_plain(item) for item in node.items]
    assert isinstance(node, Scalar)
    return node.text if node.text in ("on", "off") else scalar_value(node)


def plain(text: str) -> Any:
    return as_plain(specs._parse(text, Report("test")))


def test_the_json_schema_accepts_what_we_accept(tmp_path: Path) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    jsonschema.Draft202012Validator.check_schema(json_schema())
    validator = jsonschema.Draft202012Validator(json_schema())
    texts = [SPEC, *(spec.path.read_text() for spec in load_specs(REPOSITORY_SPECS).values())]
    for text in texts:
        assert [error.message for error in validator.iter_errors(plain(text))] == []
    assert list(validator.iter_errors(plain(changed("kernel: quant.cast", "kernal: quant.cast"))))
    assert list(validator.iter_errors(plain(changed("T: {max: 2147483647}", "T: 4096"))))


def test_the_json_schema_describes_every_key(tmp_path: Path) -> None:
    schema = json_schema()
    assert schema["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    assert set(plain(SPEC)) | {"template"} == set(schema["properties"])
    assert schema["required"] == ["spec", "kernel", "summary", "args", "targets"]
    assert schema["additionalProperties"] is False
    assert set(schema["properties"]["args"]["additionalProperties"]["required"]) == {"role", "dtype", "shape"}


def test_the_known_fills_are_those_there_are() -> None:
    fills = pytest.importorskip("tkbuild.fills")
    assert set(FILL_NAMES) == {*fills._FILLS, "none"}


def test_folders_that_cannot_be_read_are_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_spec(tmp_path)
    closed = tmp_path / "closed"
    closed.mkdir()
    scandir = os.scandir

    def refusing(path: str) -> Any:
        if Path(path) == closed:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refusing)
    with pytest.raises(SpecError, match="closed: this folder cannot be read: Permission denied"):
        load_specs(tmp_path)


def test_files_of_editors_are_no_specs(tmp_path: Path) -> None:
    write_spec(tmp_path)
    (tmp_path / ".#cast.yaml").symlink_to("user@host.1")
    (tmp_path / ".cast.yaml").write_text("half a")
    assert list(load_specs(tmp_path)) == ["quant.cast"]


def test_two_kernels_of_one_operator_are_refused(tmp_path: Path) -> None:
    first = write_spec(tmp_path)
    second = tmp_path / "other.yaml"
    second.write_text(changed("kernel: quant.cast", "kernel: quant.other\ntemplate: cast.py.j2"))
    with pytest.raises(SpecError, match=f"{second}:.* operator cast_groups is already that of {first}"):
        load_specs(tmp_path)

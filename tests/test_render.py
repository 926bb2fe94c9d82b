"""render: values become Python literals and nothing else; missing and unused names, and foreign files, are errors."""

from __future__ import annotations

import ast
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from spec_text import SPEC, TEMPLATE, changed, write_spec

from tkbuild.errors import RenderError, StepTimeoutError
from tkbuild.render import RenderedSource, Renderer, render
from tkbuild.specs import load_spec
from tkbuild.variants import expand

MINIMAL = (
    "spec: 1\nkernel: a.cast\nsummary: s\nargs: {{x: {{role: inout, dtype: int8, shape: [N]}}}}\n"
    "constants: {{v: {v}}}\ntargets: {{sm_90a: {t}}}\n"
)


def rendered(folder: Path, template: str, v: str = "1", t: str = "{}") -> str:
    spec = load_spec(write_spec(folder, MINIMAL.format(v=v, t=t), template))
    return render(expand(spec)[0]).text


def refused(folder: Path, template: str, v: str = "1", t: str = "{}") -> RenderError:
    with pytest.raises(RenderError) as caught:
        rendered(folder, template, v, t)
    return caught.value


def test_a_variant_is_filled_in(tmp_path: Path) -> None:
    variant = expand(load_spec(write_spec(tmp_path)))[0]
    source = render(variant)
    assert isinstance(source, RenderedSource)
    assert source.variant == variant.id
    assert source.text == (
        "import tilelang.language as T\n\n"
        "IN, BLOCK, FORMAT, CAP = 'bfloat16', 32, 'f32', 64\n"
        "PACKED, BATCHED, LANES = False, False, (4, 8)\n"
        "THREADS, ROWS, VECTOR = 128, 4, 16\n"
    )
    assert [(file.name, file.content) for file in source.sources] == [("helpers.py", b"HELP = 1\n")]


def test_the_text_depends_on_nothing_but_its_inputs(tmp_path: Path) -> None:
    texts = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        texts.append([render(variant).text for variant in expand(load_spec(write_spec(tmp_path / name)))])
    assert texts[0] == texts[1]
    assert len(set(texts[0])) == len(texts[0])


@pytest.mark.parametrize(
    ("template", "telling", "line"),
    [
        ("{{ v }}\n{{ num_topkk }}", "'num_topkk' is undefined; the template sees target, tuning, v", 2),
        ("{{ v }}\n{% if use_packd %}\n1\n{% endif %}", "'use_packd' is undefined", 2),
        ("{{ v }}\n\n{% for x in shapess %}{{ x }}{% endfor %}", "'shapess' is undefined", 3),
        ("{{ v }}\n{{ tuning.hiden }}", "tuning has no 'hiden'; it has: depth", 2),
        ("{{ v }}\n{{ target.sm_count }}", "target has no 'sm_count'; it has: arch, vector_bytes", 2),
        ("{{ v }}\n{{ v.real }}{{ v.nope }}", "has no attribute 'nope'", 2),
        ("{{ v }}\n{{ tuning.items() }}", "tuning has no 'items'", 2),
        ("{{ v }}\n{{ tuning }}", "no literal", 2),
        ("{{ v }}\n{{ tuning.depth / 1 }}", "use // instead of /", 2),
        ("{{ v }}\n{{ 1 / 0 }}", "ZeroDivisionError", 2),
        ("{{ v }}\n{{ range }}", "no literal", 2),
        ("{{ v }}\n{% if %}", "syntax error", 2),
        ("{{ v }}\n{{ v", "syntax error", 2),
        ("{{ v }}\n{{ v | nofilter }}", "syntax error: No filter named 'nofilter'", 2),
        ("{{ v }}\n{{ ().__class__ }}", "access to attribute '__class__' of 'tuple' object is unsafe", 2),
        ("{{ v }}\n{{ tuning._values }}", "tuning has no '_values'", 2),
        ("{{ v }}\n{{ (tuning|attr('_values')) }}", "tuning has no '_values'", 2),
        ("{{ v }}\n{% filter upper %}x{% endfilter %}", "no filter blocks", 2),
        ("{{ v }}\n{% call v.format() %}{% endcall %}", "only a macro can be called", 2),
        ("{{ v }}\n{% include '../outside.j2' %}", "no template '../outside.j2'", None),
        ("{{ v }}\n{% include '/etc/hostname' %}", "no template '/etc/hostname'", None),
        ("{{ v }}\n{% include 'link.j2' %}", "no template 'link.j2'", None),
        ("{{ v }}\n{% include tuning.depth %}", "must be a constant", 1),
        ("{{ v }}{% for i in range(10000000) %}{% endfor %}", "range too big|OverflowError|Range too big", 1),
    ],
)
def test_what_a_template_cannot_do(tmp_path: Path, template: str, telling: str, line: int | None) -> None:
    folder = tmp_path / "specs"
    folder.mkdir()
    (tmp_path / "outside.j2").write_text("outside")
    (folder / "link.j2").symlink_to(tmp_path / "outside.j2")
    error = refused(folder, template + "{# #}{% if tuning.depth %}{% endif %}", t="{depth: 3}")
    assert any(part in str(error) for part in telling.split("|")), error
    assert (error.template, error.line, error.variant) == (str(folder / "cast.py.j2"), line, "a.cast-sm_90a")
    assert str(folder / "cast.yaml") in str(error)


@pytest.mark.parametrize(
    ("spec_change", "template_change", "telling"),
    [
        (("", ""), ("{{ block }}", "32"), "axis 'block': in the spec, but the template never uses it"),
        (("", ""), ("{{ batched }}", "False"), "constant 'batched'"),
        (("{threads: 128,", "{threds: 1, threads: 128,"), ("", ""), "tuning value 'threds'"),
    ],
)
def test_what_no_template_uses_is_stale(
    tmp_path: Path, spec_change: tuple[str, str], template_change: tuple[str, str], telling: str
) -> None:
    text = changed(*spec_change) if spec_change[0] else SPEC
    template = changed(*template_change, text=TEMPLATE) if template_change[0] else TEMPLATE
    with pytest.raises(RenderError) as caught:
        render(expand(load_spec(write_spec(tmp_path, text, template)))[0])
    assert telling in str(caught.value)


def test_a_name_in_a_comment_is_not_a_use(tmp_path: Path) -> None:
    assert "constant 'v'" in str(refused(tmp_path, "{# v #} x = 'v'  # {% raw %}{{ v }}{% endraw %}"))


def test_tuning_that_is_indexed_by_an_axis(tmp_path: Path) -> None:
    text = rendered(tmp_path, "{{ tuning.rows[v] }} {{ tuning['rows'][v] }}", v="32", t="{rows: {32: 4, 64: 8}}")
    assert text == "4 4\n"


def test_includes_and_imports_from_the_folder(tmp_path: Path) -> None:
    (tmp_path / "part.j2").write_text("PART = {{ v }}\n")
    macros = "{% macro load(name, n) %}load({{ name }}, {{ n }}){% endmacro %}{% macro twice() %}{{ caller() }}{{ caller() }}"
    macros += "{% endmacro %}"
    (tmp_path / "macros.j2").write_text(macros)
    template = (
        "{% include 'part.j2' %}{% import 'macros.j2' as m %}{% from 'macros.j2' import load %}"
        "{{ m.load(v, 2) }};{{ load('a', 3) }};{% call m.twice() %}[{{ v }}]{% endcall %};{{ load(v, 1) | upper }}"
    )
    expected = "PART = 'x'\nload('x', 2);load('a', 3);['x']['x'];\"LOAD('X', 1)\"\n"
    assert rendered(tmp_path, template, v="x") == expected


def test_includes_from_the_common_folder(tmp_path: Path) -> None:
    family = tmp_path / "family"
    family.mkdir()
    (tmp_path / "common").mkdir()
    (tmp_path / "common/part.j2").write_text("PART = {{ v }}\n")
    (tmp_path / "common/wrong.j2").write_text("\n{{ missing }}")
    (tmp_path / "common/link.j2").symlink_to("/etc/hostname")
    assert rendered(family, "{% include '../common/part.j2' %}", v="x") == "PART = 'x'\n"
    error = refused(family, "{{ v }}{% include '../common/wrong.j2' %}")
    assert (Path(str(error.template)).resolve(), error.line) == (tmp_path / "common/wrong.j2", 2)
    for name in ("../common/link.j2", "../common/../family/cast.py.j2", "../common/nothing.j2"):
        assert f"no template '{name}'" in str(refused(family, f"{{{{ v }}}}{{% include '{name}' %}}"))


def test_errors_in_included_templates_name_them(tmp_path: Path) -> None:
    (tmp_path / "part.j2").write_text("\n\n{{ missing }}")
    error = refused(tmp_path, "{{ v }}{% include 'part.j2' %}")
    assert (error.template, error.line) == (str(tmp_path / "part.j2"), 3)


INJECTIONS = [
    "'; import os; os.system('x') #", '"""\nimport os\n"""', "{{ 1 + 1 }}", "{% raw %}", "x\nimport os", "\\'; boom #",
    "{{ v.__class__ }}",
    "\u2028import os", "\x85import os", "'''", "{#", "None", "__import__('os')",
]  # fmt: skip


@pytest.mark.parametrize("text", INJECTIONS)
@pytest.mark.parametrize(
    "template", ["x = {{ v }}", "x = {{ v | upper }}", "x = {{ v ~ v }}", "x = {{ v | safe }}", "x = {{ v.strip() }}"]
)
def test_a_value_stays_data(tmp_path: Path, text: str, template: str) -> None:
    try:
        source = rendered(tmp_path, template, v=yaml_text(text))
    except RenderError as error:
        assert "Markup" in str(error)
        return
    (statement,) = ast.parse(source).body
    assert isinstance(statement, ast.Assign)
    assert isinstance(ast.literal_eval(statement.value), str)


def yaml_text(text: str) -> str:
    escapes = {"\n": "\\n", "\x85": "\\N", "\u2028": "\\L", "\\": "\\\\", '"': '\\"'}
    return '"' + "".join(escapes.get(character, character) for character in text) + '"'


VALUES = st.recursive(
    st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.none() | st.text(max_size=20),
    lambda v: st.lists(v, max_size=3).map(tuple),
    max_leaves=6,
)


@given(value=VALUES)
@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_literals_mean_the_value(tmp_path: Path, value: Any) -> None:
    spec = load_spec(write_spec(tmp_path, MINIMAL.format(v=1, t="{}"), "{{ v }}"))
    spec.constants["v"] = value  # type: ignore[index]
    assert ast.literal_eval(render(expand(spec)[0]).text) == value


@pytest.mark.parametrize("value", ["1.0", "-2e3", "0.0"])
def test_whole_floats_are_refused(tmp_path: Path, value: str) -> None:
    assert "use //" in str(refused(tmp_path, "{{ v }}", v=value))
    assert rendered(tmp_path, "{{ v }}", v="0.5") == "0.5\n"


def test_templates_that_are_no_text(tmp_path: Path) -> None:
    spec = load_spec(write_spec(tmp_path, MINIMAL.format(v=1, t="{}"), "{{ v }}"))
    (tmp_path / "cast.py.j2").write_bytes(b"{{ v }}\n\xff")
    with pytest.raises(RenderError, match=r"cast.py.j2:2: .*is not UTF-8"):
        render(expand(spec)[0])
    (tmp_path / "cast.py.j2").unlink()
    with pytest.raises(RenderError, match=r"no template 'cast.py.j2'"):
        render(expand(spec)[0])


def test_rendering_many_variants_is_fast(tmp_path: Path) -> None:
    variants = (expand(load_spec(write_spec(tmp_path))) * 7)[:500]
    took = []
    for _ in range(3):
        start = time.process_time()
        renderer = Renderer()
        assert len([renderer.render(variant) for variant in variants]) == 500
        took.append(time.process_time() - start)
    assert min(took) < 0.3


@pytest.mark.parametrize(
    ("template", "line"),
    [
        ("{{ v }}\n{{ vv | default(3) }}", 2),
        ("{{ v }}\n\n{% if vv is defined %}1{% endif %}", 3),
        ("{{ v }}{% if v > 5 %}\n{{ vv }}{% endif %}", 2),
        ("{{ v }}{% include 'part.j2' %}", 4),
    ],
)
def test_misspelt_names_are_found_where_nothing_reads_them(tmp_path: Path, template: str, line: int) -> None:
    (tmp_path / "part.j2").write_text("\n\n\n{{ vv | default(v) }}")
    error = refused(tmp_path, template)
    assert "'vv' is undefined; the template sees target, tuning, v" in str(error)
    assert (error.line, Path(error.template).name) == (line, "part.j2" if "include" in template else "cast.py.j2")


def test_a_misspelt_name_is_told_before_the_right_one_that_nothing_uses(tmp_path: Path) -> None:
    error = refused(tmp_path, "1\n{{ vv }}")
    assert "'vv' is undefined; the template sees target, tuning, v" in str(error)
    assert error.line == 2


def test_names_that_a_template_defines_are_known(tmp_path: Path) -> None:
    (tmp_path / "part.j2").write_text("{{ given | default(1) }}{{ loop is defined }}")
    template = (
        "{% if v > 5 %}{% set w = 1 %}{% endif %}{{ w is defined }}{% set given = v %}"
        "{% for i in range(2) %}{% include 'part.j2' %}{% endfor %}"
    )
    assert rendered(tmp_path, template) == "False1False1False\n"


def test_a_template_that_does_not_end_is_stopped(tmp_path: Path) -> None:
    loops = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    (variant,) = expand(load_spec(write_spec(tmp_path, MINIMAL.format(v=1, t="{}"), f"{{{{ v }}}}\n{loops}")))
    before = signal.getsignal(signal.SIGVTALRM)
    with pytest.raises(StepTimeoutError, match=r"cast.py.j2:2: rendering a.cast-sm_90a was stopped after 0.05 s") as caught:
        Renderer(timeout_s=0.05).render(variant)
    assert (caught.value.template, caught.value.variant) == (str(tmp_path / "cast.py.j2"), "a.cast-sm_90a")
    assert signal.getsignal(signal.SIGVTALRM) == before
    assert signal.getitimer(signal.ITIMER_VIRTUAL) == (0.0, 0.0)


def test_other_threads_render_too(tmp_path: Path) -> None:
    (variant,) = expand(load_spec(write_spec(tmp_path, MINIMAL.format(v=1, t="{}"), "{{ v }}")))
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(render, variant).result().text == "1\n"

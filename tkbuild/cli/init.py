"""``init``: a project of one's own that compiles, packs and verifies as it stands."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import click

from tkbuild.cli import emit_json
from tkbuild.cli.options import json_option
from tkbuild.errors import ArgumentError
from tkbuild.kernelspec import json_schema

_SPEC = """\
# yaml-language-server: $schema=../../schema.json
spec: 1
kernel: mine.scale
summary: Multiply every element of a matrix by a factor.
source: this project

axes:
  dtype: {type: dtype, values: [bfloat16, float32]}
args:
  x: {role: in, dtype: dtype, shape: [T, H], strides: [ld, 1]}
  out: {role: out, dtype: dtype, shape: [T, H]}
scalars:
  factor: {dtype: float32, default: 1.0}
checks:
  - {require: "H % 8 == 0", because: "rows are read 16 bytes at a time"}
  - {require: "ld % 8 == 0", because: "rows start at 16-byte addresses"}

targets:
  sm_90a: {threads: 128}
  sm_100a: {threads: 128}

reference: references:scale
verify:
  tolerance: {out: exact}
  cases:
    - {why: shapes and tails, T: [1, 33], H: [8, 4096], factor: [0.5, -3.0]}
    - {why: a column slice of a wider tensor, T: 33, H: 4096, ld: 8192, factor: 2.0}
    - {why: no rows, T: 0, H: 4096, factor: 1.0}
bench:
  workloads:
    - {T: 8192, H: 7168, factor: 0.5}
"""

_TEMPLATE = """\
import tilelang.language as T

T_, H, ld = T.dynamic("T"), T.dynamic("H"), T.dynamic("ld")
THREADS, ELEMS = {{ tuning.threads }}, 8
COLUMNS = THREADS * ELEMS


@T.prim_func
def kernel(
    x: T.StridedTensor((T_, H), (ld, 1), {{ dtype }}),
    out: T.Tensor((T_, H), {{ dtype }}),
    factor: T.float32,
):
    with T.Kernel(T.ceildiv(H, COLUMNS), T_, threads=THREADS) as (block, row):
        # What is assumed here is checked at every call: see `checks` in the spec.
        T.assume(H % 8 == 0)
        T.assume(ld % 8 == 0)
        for i, v in T.Parallel(THREADS, ELEMS):
            if block * COLUMNS + i * ELEMS + v < H:
                out[row, block * COLUMNS + i * ELEMS + v] = x[row, block * COLUMNS + i * ELEMS + v] * factor
"""

_REFERENCE = '''\
"""Plain torch versions of this project's kernels: what `tkbuild verify` compares with."""

import torch


def scale(x: torch.Tensor, *, factor: float) -> torch.Tensor:
    """Return x * factor, rounded once."""
    return (x.float() * factor).to(x.dtype)
'''

_TEST = '''\
"""The reference against a value computed by hand, and the spec against its schema."""

from pathlib import Path

import torch
from references import scale

from tkbuild.cases import reference_function
from tkbuild.specs import load_specs


def test_scale() -> None:
    assert scale(torch.tensor([[1.5, -2.0]]), factor=2.0).tolist() == [[3.0, -4.0]]


def test_specs_load_and_name_their_references() -> None:
    specs = load_specs(Path(__file__).parent.parent / "kernel_specs")
    assert "mine.scale" in specs
    for spec in specs.values():
        if spec.reference:
            reference_function(spec.reference)
'''

_README = """\
# Kernels of one's own

    tkbuild compile --arch sm_90a                     # needs no GPU
    tkbuild package --arch sm_90a                     # dist/, under the name that kernel_specs/profiles/default.yaml gives the wheels
    pip install pytest && python -m pytest            # the reference against values computed by hand

On the GPU machine, with the wheel installed and this folder on PYTHONPATH (for references.py):

    tkbuild verify 'mine.*'
    tkbuild bench 'mine.*'
    python -c "import torch, tkbuild.ops; print(torch.ops.tkbuild.mine_scale(torch.ones(4, 8, device='cuda'), factor=2.0))"
"""

_FILES = {
    "kernel_specs/mine/scale.yaml": _SPEC,
    "kernel_specs/mine/scale.py.j2": _TEMPLATE,
    "kernel_specs/profiles/default.yaml": 'profile: default\nwheel: WHEEL\nkernels: ["*"]\n',
    "references.py": _REFERENCE,
    "tests/conftest.py": "import sys\nfrom pathlib import Path\n\nsys.path.insert(0, str(Path(__file__).parent.parent))\n",
    "tests/test_scale.py": _TEST,
    "README.md": _README,
    ".gitignore": "artifacts/\ndist/\n__pycache__/\n",
    "schema.json": json.dumps(json_schema(), indent=2, sort_keys=True) + "\n",
}


@click.command("init")
@click.argument("directory", type=click.Path(path_type=Path))
@json_option
def init_command(directory: Path, as_json: bool) -> None:
    """Start a project of your own in DIRECTORY: a spec, its template, a reference and tests. Overwrites nothing."""
    try:
        _write_files(directory)
    except OSError as exc:
        raise ArgumentError(
            f"{exc.filename or directory} cannot be written: {exc.strerror}; name another folder", directory=str(directory)
        ) from exc
    if as_json:
        emit_json({"directory": str(directory), "files": list(_FILES)})
        return
    click.echo(f"{directory}: next, `cd {shlex.quote(str(directory))} && tkbuild compile --arch sm_90a`; see its README.md")


def _write_files(directory: Path) -> None:
    existing = [name for name in _FILES if (directory / name).exists()]
    if existing:
        raise ArgumentError(f"{directory} has {', '.join(existing)} already; name a new folder", directory=str(directory))
    wheel = _wheel_name(directory)
    for name, text in _FILES.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text.replace("WHEEL", wheel), "utf-8")


def _wheel_name(directory: Path) -> str:
    """The folder's name; never one of tkbuild's own wheels, which an installation would replace."""
    words = re.findall("[a-z0-9]+", directory.resolve().name.lower())
    is_free = words and words[0][0].isalpha() and words[0] != "tkbuild"
    return "-".join(words if is_free else ["my", *(words or ["kernels"])])

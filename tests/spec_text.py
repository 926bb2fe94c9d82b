"""A complete kernel spec with its template, as text that tests change in one place."""

from __future__ import annotations

from pathlib import Path

SPEC = """\
spec: 1
kernel: quant.cast
summary: Quantise groups of each row.
source: own method
constants: {batched: false, lanes: [4, 8]}
sources: [helpers.py]
axes:
  in_dtype: {type: dtype, values: [bfloat16, float32]}
  block: {type: int, tag: b, values: [32, 64, 128]}
  sf_format: {type: str, values: [f32, ue8m0]}
  packed: {type: bool, values: [false, true]}
  cap: {type: int, tag: e, values: [64, 256], choose: {rule: at_least, of: E}}
constraints:
  - {require: "packed == 0 or sf_format == 'ue8m0'", because: "only ue8m0 scales are packed"}
args:
  x: {role: in, dtype: in_dtype, shape: [T, H], strides: [ld, 1], align: 16}
  w: {role: in, dtype: float32, shape: [E], optional: true}
  out: {role: out, dtype: float8_e4m3fn, shape: [T, H]}
  sf: {role: out, dtype: {axis: sf_format, map: {f32: float32, ue8m0: int32}}, shape: [T, "ceildiv(H, block)"],
       strides: [sf_row, sf_col], alloc: {strides: ["1 if col_major else ceildiv(H, block)", "T if col_major else 1"],
       elems: "T * ceildiv(H, block)"}}
scalars:
  round_sf: {dtype: int32, default: 0, doc: Whether scales are powers of two.}
  eps: {dtype: float32, default: 1e-6}
options:
  col_major: {dtype: bool, default: false}
dims: {T: {max: 2147483647}, ld: {dtype: int64}}
checks:
  - {require: "H % block == 0", because: "hidden must be a multiple of the group"}
launch: {programmatic: off}
targets:
  sm_90a: {threads: 128, rows: {bf16: 2, f32: 4}}
  sm_100a: {threads: 256, rows: {bf16: 2, f32: 4}}
pass_configs: {tl.disable_warp_specialized: true}
compile_flags: ["-Xptxas=-O3"]
allow: {spill_bytes: 8}
op: {name: cast_groups}
reference: quant.cast
verify:
  tolerance: {out: exact, sf: {atol: 1e-6}}
  inputs: {x: normal}
  cases:
    - {why: tail, T: [1, 31], H: [576, 7168], E: 8, ld: ["H", "H + 64"], round_sf: [0, 1], block: [32, 64]}
bench:
  bytes: "bytes(x) + bytes(out) + bytes(sf)"
  workloads:
    - {T: 8192, H: 7168, E: 64}
"""

TEMPLATE = """\
import tilelang.language as T

IN, BLOCK, FORMAT, CAP = {{ in_dtype }}, {{ block }}, {{ sf_format }}, {{ cap }}
PACKED, BATCHED, LANES = {{ packed }}, {{ batched }}, {{ lanes }}
THREADS, ROWS, VECTOR = {{ tuning.threads }}, {{ tuning.rows.f32 }}, {{ target.vector_bytes }}
"""


def write_spec(folder: Path, text: str = SPEC, template: str = TEMPLATE) -> Path:
    """Write the spec with its template and source file into ``folder``; return the spec's path."""
    (folder / "cast.py.j2").write_text(template, encoding="utf-8")
    (folder / "helpers.py").write_text("HELP = 1\n", encoding="utf-8")
    path = folder / "cast.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def changed(old: str, new: str, text: str = SPEC) -> str:
    """Return ``text`` with ``old``, which is in it once, replaced by ``new``."""
    assert text.count(old) == 1, f"{old!r} occurs {text.count(old)} times"
    return text.replace(old, new)

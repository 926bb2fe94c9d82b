"""signature: JSON round trip and golden form, strict reading, and what follows from a call."""

from __future__ import annotations

import copy
import json
import time
from pathlib import Path
from typing import Any

import pytest
from spec_text import write_spec

from tkbuild.errors import ArgumentError, IntegrityError
from tkbuild.expr import Expr
from tkbuild.signature import AxisSpec, Choose, DtypeRule, KernelSignature
from tkbuild.specs import load_spec

GOLDEN_SF = {
    "name": "sf",
    "role": "out",
    "dtype": {"axis": "sf_format", "map": {"f32": "float32", "ue8m0": "int32"}},
    "shape": ["T", ["ceildiv", "H", "block"]],
    "strides": ["sf_row", "sf_col"],
    "align": 16,
    "optional": False,
    "alloc": {
        "strides": [["select", "col_major", 1, ["ceildiv", "H", "block"]], ["select", "col_major", "T", 1]],
        "elems": ["*", "T", ["ceildiv", "H", "block"]],
    },
}


@pytest.fixture
def signature(tmp_path: Path) -> KernelSignature:
    return load_spec(write_spec(tmp_path)).signature


def test_the_json_form(signature: KernelSignature) -> None:
    value = signature.to_json()
    assert list(value) == ["summary", "source", "op", "axes", "args", "scalars", "options", "dims", "checks"]
    choose = {"rule": "at_least", "of": "E"}
    assert value["axes"][4] == {"name": "cap", "type": "int", "tag": "e", "values": [64, 256], "choose": choose}
    assert value["args"][3] == GOLDEN_SF
    assert value["args"][0]["dtype"] == "in_dtype"
    assert value["scalars"][1] == {"name": "eps", "dtype": "float32", "default": 1e-6, "doc": ""}
    assert value["dims"] == {
        "T": {"dtype": "int32", "min": None, "max": 2147483647},
        "ld": {"dtype": "int64", "min": None, "max": None},
    }
    because = "hidden must be a multiple of the group"
    assert value["checks"] == [{"require": ["==", ["%", "H", "block"], 0], "text": "H % block == 0", "because": because}]


def test_json_reads_back(signature: KernelSignature) -> None:
    assert KernelSignature.from_json("quant.cast", json.loads(json.dumps(signature.to_json()))) == signature


def _paths(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path] + [deeper for key, item in items for deeper in _paths(item, (*path, key))]


def _replaced(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    value = copy.deepcopy(value)
    place = value
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = new
    return value


def test_damage_anywhere_is_found_or_harmless_but_never_breaks(signature: KernelSignature) -> None:
    value = signature.to_json()
    refusals = 0
    for path in _paths(value)[1:]:
        for new in (object(), [], {}, 1.5, "no such thing!", None, True):
            try:
                KernelSignature.from_json("quant.cast", _replaced(value, path, new))
            except IntegrityError:
                refusals += 1
    assert refusals > 500


def test_missing_and_unknown_fields_are_refused(signature: KernelSignature) -> None:
    value = signature.to_json()
    with pytest.raises(IntegrityError, match="unknown fields extra"):
        KernelSignature.from_json("quant.cast", value | {"extra": 1})
    del value["args"][0]["align"]
    with pytest.raises(IntegrityError, match=r"args\[0\].align: expected int"):
        KernelSignature.from_json("quant.cast", value)
    with pytest.raises(IntegrityError, match="expected an object"):
        KernelSignature.from_json("quant.cast", [])


def test_what_binds_at_a_call(signature: KernelSignature) -> None:
    assert [(dim.name, dim.dtype, dim.max) for dim in signature.bound_dims] == [
        ("T", "int32", 2147483647),
        ("H", "int32", None),
        ("ld", "int64", None),
        ("E", "int32", None),
        ("sf_row", "int32", None),
        ("sf_col", "int32", None),
    ]
    assert [axis.name for axis in signature.call_axes] == ["in_dtype", "block", "sf_format", "packed"]


def test_dtypes_follow_axes(signature: KernelSignature) -> None:
    x, _, out, sf = signature.args
    axes = {"in_dtype": "bfloat16", "sf_format": "ue8m0"}
    assert [arg.dtype.resolve(axes) for arg in (x, out, sf)] == ["bfloat16", "float8_e4m3fn", "int32"]
    assert DtypeRule("packed", (("true", "int8"), ("false", "uint8"))).resolve({"packed": True}) == "int8"
    with pytest.raises(ArgumentError, match="no dtype for sf_format=e5m2"):
        sf.dtype.resolve({"sf_format": "e5m2"})


@pytest.mark.parametrize(
    ("rule", "wanted", "picked"),
    [
        ("at_least", 65, 128), ("at_least", 64, 64), ("at_least", 300, None), ("equal", 64, 64), ("equal", 65, None),
        ("divides", 192, 64), ("divides", 256, 256), ("divides", 100, None),
    ],
)  # fmt: skip
def test_axes_that_follow_from_a_call(rule: str, wanted: int, picked: int | None) -> None:
    assert Choose(rule, Expr("E")).pick((128, 64, 256), wanted) == picked


def test_tokens_of_axis_values() -> None:
    assert AxisSpec("d", "dtype", "", ("bfloat16",)).token("bfloat16") == "bf16"
    assert AxisSpec("block", "int", "b", (128,)).token(128) == "b128"
    assert AxisSpec("packed", "bool", "packed", (True,)).token(True) == "packed1"


def test_reading_a_hundred_signatures_takes_milliseconds(signature: KernelSignature) -> None:
    value = signature.to_json()
    took = []
    for _ in range(5):
        start = time.process_time()
        for _ in range(100):
            KernelSignature.from_json("quant.cast", value)
        took.append(time.process_time() - start)
    assert min(took) < 0.1

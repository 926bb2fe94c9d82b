"""dtypes: names, short names and sizes agree with torch, which is only asked here."""

import pytest

from tkbuild.dtypes import BY_SHORT_NAME, DTYPES, TENSOR_DTYPES, dtype
from tkbuild.errors import ArgumentError


def test_torch_has_every_tensor_dtype_with_the_stated_size() -> None:
    torch = pytest.importorskip("torch")
    for name in TENSOR_DTYPES:
        torch_dtype = getattr(torch, DTYPES[name].torch_name or "")
        assert str(torch_dtype) == f"torch.{name}"
        assert 8 * torch_dtype.itemsize == DTYPES[name].bits


def test_short_names_are_unique_and_fit_into_variant_ids() -> None:
    assert len(BY_SHORT_NAME) == len(DTYPES)
    assert all(short.isalnum() and short.islower() for short in BY_SHORT_NAME)


def test_the_short_names_of_the_variant_id_contract() -> None:
    expected = {
        "bf16": "bfloat16", "f16": "float16", "f32": "float32", "e4m3": "float8_e4m3fn", "e5m2": "float8_e5m2",
        "e2m1": "float4_e2m1fn", "i8": "int8", "u8": "uint8", "i32": "int32", "i64": "int64",
    }  # fmt: skip
    assert {short: BY_SHORT_NAME[short].name for short in expected} == expected


@pytest.mark.parametrize(
    ("name", "hint"), [("bf16", "did you mean bfloat16?"), ("bfloat61", "did you mean bfloat16?"), ("", "known: bfloat16")]
)
def test_unknown_names_get_a_hint(name: str, hint: str) -> None:
    with pytest.raises(ArgumentError, match=r"unknown dtype") as caught:
        dtype(name)
    assert hint in str(caught.value)


def test_a_four_bit_format_is_no_tensor_dtype() -> None:
    assert "float4_e2m1fn" not in TENSOR_DTYPES
    assert dtype("float4_e2m1fn").bits == 4

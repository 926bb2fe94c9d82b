"""The references of the transposition kernels, against values written out by hand."""

from __future__ import annotations

import pytest
import torch

from tkbuild.reference.transpose import batched_transpose, transpose


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float8_e4m3fn])
def test_rows_become_columns(dtype: torch.dtype) -> None:
    x = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]).to(dtype)
    out = transpose(x)
    assert out.dtype == dtype
    assert out.float().tolist() == [[1.0, 4.0], [2.0, 5.0], [3.0, 6.0]]
    assert out.is_contiguous()


def test_row_gaps_are_not_read_as_data() -> None:
    x = torch.arange(12.0).reshape(3, 4)[:, :2]
    assert transpose(x).tolist() == [[0.0, 4.0, 8.0], [1.0, 5.0, 9.0]]


def test_every_nan_keeps_its_bits() -> None:
    bits = torch.tensor([[0x7F, 0xFF], [0x80, 0x01]], dtype=torch.uint8)
    out = transpose(bits.view(torch.float8_e4m3fn))
    assert out.view(torch.uint8).tolist() == [[0x7F, 0x80], [0xFF, 0x01]]


def test_matrices_of_a_batch_stay_apart() -> None:
    x = torch.tensor([[[1.0, 2.0]], [[3.0, 4.0]]])
    assert batched_transpose(x).tolist() == [[[1.0], [2.0]], [[3.0], [4.0]]]


def test_batch_and_row_strides_are_followed() -> None:
    x = torch.arange(20.0).as_strided((2, 2, 2), (10, 3, 1))
    assert batched_transpose(x).tolist() == [[[0.0, 3.0], [1.0, 4.0]], [[10.0, 13.0], [11.0, 14.0]]]


@pytest.mark.parametrize(("shape", "transposed"), [((0, 64), (64, 0)), ((64, 0), (0, 64))])
def test_empty_matrices(shape: tuple[int, int], transposed: tuple[int, int]) -> None:
    assert transpose(torch.empty(shape)).shape == transposed
    assert batched_transpose(torch.empty(3, *shape)).shape == (3, *transposed)

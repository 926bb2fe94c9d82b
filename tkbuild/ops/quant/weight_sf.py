"""Scales of weights in the layouts that matrix products read."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tkbuild.errors import ArgumentError
from tkbuild.ops.quant.types import QuantTensor
from tkbuild.runtime.op import kernel_op

_pack = kernel_op("quant.batched_transpose_weight_sf")
_NAME = "quant.batched_transpose_weight_sf"
_WEIGHT_ALIGNMENT = 128
_OUT_ALIGNMENT_BYTES = 32
#: Words that a CTA of the kernel writes: its warps x chunks of 128 words.
_TILE_WORDS = 32 * 128


def batched_transpose_weight_sf(
    sf: Sequence[torch.Tensor],
    block_size: int,
    transpose_sf1s: Sequence[bool],
    outs: Sequence[QuantTensor | None] | None = None,
) -> list[QuantTensor]:
    """Pack the scales of many weights, and of their transposes, in one launch; returns (sf0, sf1) of each weight.

    sf0 has the packed exponents of its block row for every row of the weight: byte q of word [r, w] is that of
    sf[r // block_size, 4 w + q]. sf1 is the same for the transposed weight. Bytes behind the last block are 0. Only exponents
    count: signs and mantissas are ignored, and scales should be positive powers of two.

    Shapes: sf (n / b, k / b), or (g, n / b, k / b) with all results led by g; n and k multiples of 128; b = block_size 32 or 128 ->
    sf0 (n, ceil(k / b / 4)), sf1 (k, ceil(n / b / 4)), or (ceil(n / b / 4), k) where transpose_sf1s is true.
    Dtypes: sf float32, results int32.  Layout: sf contiguous, all on one device; sf0 and sf1 with strides (1, n) and (1, k); the
    transposed sf1 contiguous. Results share one piece of memory, except those whose entry of ``outs`` gives tensors of the
    same shape and strides at multiples of 32 bytes, which are written and returned.
    Where each weight lies is copied to the device at every call, from memory that is not pinned: not for graph capture, nor
    for torch.compile. As with any operator, a tensor made on another stream must outlive the work on this one; on one stream
    nothing is to be done, since memory that is freed is used again in order.
    Raises: ArgumentError, NoVariantError, LaunchError.
    """
    given = list(outs) if outs is not None else [None] * len(sf)
    if not len(sf) == len(transpose_sf1s) == len(given):
        raise ArgumentError(
            f"{_NAME}: {len(sf)} tensors, {len(transpose_sf1s)} transpose_sf1s, {len(given)} outs; expected as many of each"
        )
    if block_size not in (32, 128):
        raise ArgumentError(f"{_NAME}: block_size is {block_size}, expected 32 or 128", block_size=block_size)
    weights = [_weight(index, scales, block_size, sf[0].device) for index, scales in enumerate(sf)]
    if not weights:
        return []
    for index, (weight, turned, pair) in enumerate(zip(weights, transpose_sf1s, given, strict=True)):
        _check_outs(index, weight, turned, pair, sf[0].device)
    results = _results(weights, transpose_sf1s, given, sf[0].device)
    _launch(sf, weights, results, block_size)
    return results


@dataclass(frozen=True)
class _Weight:
    """The extents of a weight's scales, in blocks, and of the weight."""

    groups: int | None
    block_rows: int
    block_cols: int
    rows: int
    cols: int

    @property
    def lead(self) -> tuple[int, ...]:
        return () if self.groups is None else (self.groups,)

    @property
    def count(self) -> int:
        return 1 if self.groups is None else self.groups

    @property
    def plain_shape(self) -> tuple[int, ...]:
        """Of the words of sf0 in memory."""
        return (*self.lead, -(-self.block_cols // 4), self.rows)

    @property
    def transposed_shape(self) -> tuple[int, ...]:
        return (*self.lead, -(-self.block_rows // 4), self.cols)

    @property
    def plain_words(self) -> int:
        return self.count * -(-self.block_cols // 4) * self.rows

    @property
    def transposed_words(self) -> int:
        return self.count * -(-self.block_rows // 4) * self.cols

    @property
    def words(self) -> int:
        return self.plain_words + self.transposed_words

    @property
    def tiles(self) -> int:
        return -(-self.plain_words // _TILE_WORDS) + -(-self.transposed_words // _TILE_WORDS)


def _weight(index: int, scales: torch.Tensor, block: int, device: torch.device) -> _Weight:
    if scales.dtype != torch.float32 or scales.dim() not in (2, 3) or not scales.is_contiguous() or scales.device != device:
        raise ArgumentError(
            f"{_NAME}: sf[{index}] is {scales.dtype} {tuple(scales.shape)} with strides {scales.stride()} on {scales.device}, expected "
            f"contiguous float32 (n / {block}, k / {block}) or (g, n / {block}, k / {block}) on {device}"
        )
    *lead, block_rows, block_cols = scales.shape
    rows, cols = block_rows * block, block_cols * block
    if rows % _WEIGHT_ALIGNMENT or cols % _WEIGHT_ALIGNMENT:
        raise ArgumentError(
            f"{_NAME}: sf[{index}] belongs to a weight of {rows} x {cols}, expected multiples of {_WEIGHT_ALIGNMENT}"
        )
    return _Weight(lead[0] if lead else None, block_rows, block_cols, rows, cols)


def _check_outs(index: int, weight: _Weight, turned: bool, pair: QuantTensor | None, device: torch.device) -> None:
    if pair is None:
        return
    wanted = _views(weight, turned, torch.empty(weight.words, dtype=torch.int32, device="meta"))
    for which, (tensor, like) in enumerate(zip(pair, wanted, strict=True)):
        if (
            tensor.dtype != torch.int32
            or tensor.device != device
            or tensor.shape != like.shape
            or _strides_that_matter(tensor) != _strides_that_matter(like)
            or tensor.data_ptr() % _OUT_ALIGNMENT_BYTES
        ):
            raise ArgumentError(
                f"{_NAME}: outs[{index}][{which}] is {tensor.dtype} {tuple(tensor.shape)} with strides {tensor.stride()} on "
                f"{tensor.device}, expected torch.int32 {tuple(like.shape)} with strides {like.stride()} on {device} at a multiple of "
                f"{_OUT_ALIGNMENT_BYTES} bytes"
            )


def _strides_that_matter(tensor: torch.Tensor) -> list[int]:
    return [stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1 and tensor.numel()]


def _views(weight: _Weight, turned: bool, words: torch.Tensor) -> QuantTensor:
    """Return (sf0, sf1) of ``weight`` in the memory of ``words``."""
    plain = words[: weight.plain_words].view(weight.plain_shape)
    transposed = words[weight.plain_words :].view(weight.transposed_shape)
    return plain.transpose(-1, -2), transposed if turned else transposed.transpose(-1, -2)


def _results(
    weights: Sequence[_Weight], turned: Sequence[bool], given: Sequence[QuantTensor | None], device: torch.device
) -> list[QuantTensor]:
    sizes = [weight.words if pair is None else 0 for weight, pair in zip(weights, given, strict=True)]
    pool = torch.empty(sum(sizes), dtype=torch.int32, device=device)
    parts = zip(weights, turned, given, pool.split(sizes), strict=True)
    return [_views(weight, flag, words) if pair is None else pair for weight, flag, pair, words in parts]


def _launch(sf: Sequence[torch.Tensor], weights: Sequence[_Weight], results: Sequence[QuantTensor], block: int) -> None:
    tiles = [weight.tiles for weight in weights]
    if sum(tiles) == 0:
        return
    # Places count from one tensor each, in elements; the others lie wherever they lie.
    source = next(scales for scales in sf if scales.numel()).view(-1)
    target = next(tensor for pair in results for tensor in pair if tensor.numel())
    target = target.as_strided((target.numel(),), (1,))
    table = torch.tensor(
        [
            list(itertools.accumulate([0, *tiles[:-1]])),
            [_elements_between(source, scales) for scales in sf],
            [weight.block_rows for weight in weights],
            [weight.block_cols for weight in weights],
            [weight.count for weight in weights],
            [_elements_between(target, plain) for plain, _ in results],
            [_elements_between(target, transposed) for _, transposed in results],
        ]
    ).to(source.device, non_blocking=True)
    _pack((source, *table.unbind()), (target.numel(),), (block, sum(tiles)), (target,))


def _elements_between(base: torch.Tensor, tensor: torch.Tensor) -> int:
    return (tensor.data_ptr() - base.data_ptr()) // base.element_size()

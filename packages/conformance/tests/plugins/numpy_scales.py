"""Scales that are not the definition's: by other rules, with the codes under them, and of other blocks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

import octavo_numerics
from octavo.quantizer import Direction
from octavo_numerics import QuantizedArray

_BLOCK = 32


def _floor(byte: Any, _amax: Any) -> Any:
    """OCP's floor rule: one exponent less wherever the mantissa of amax is past the format's."""
    return np.maximum(byte - 1, 0)


def _log2(byte: Any, amax: Any) -> Any:
    """The next integer above a logarithm of fp32, which is that integer for amaxes that are a little larger."""
    with np.errstate(divide="ignore", invalid="ignore"):
        exponent = np.ceil(np.log2(amax / np.float32(448), dtype=np.float32))
    normal = np.isfinite(exponent) & (exponent > -126)
    return np.where(normal, np.where(normal, exponent, 0).astype(np.int64) + 127, byte)


LOWER: dict[str, Callable[[Any, Any], Any]] = {"floor-e8m0": _floor, "log2-e8m0": _log2}
"""Exponent bytes from the definition's and from amaxes, by the fault's name."""


def with_lower_scales(x: Any, q: QuantizedArray, sizes: Any, fault: str) -> QuantizedArray:
    """The row data of ragged E4M3 by another rule."""
    quantizer = q.spec.quantizer
    if q.rowwise_scale is None or q.rowwise is None or quantizer.square or quantizer.format != "e4m3" or sizes is None:
        return q
    total, columns = int(sizes.sum()), x.shape[1]
    rows = x[:total].astype(np.float32)
    padded = np.zeros((total, -(-columns // _BLOCK) * _BLOCK), np.float32)
    padded[:, :columns] = np.abs(rows)
    scale = q.rowwise_scale.copy()
    lower = LOWER[fault](scale[:total].astype(np.int64), padded.reshape(total, -1, _BLOCK).max(-1))
    scale[:total] = np.where(scale[:total] == 0xFF, 0xFF, lower)
    spread = np.repeat(scale[:total], _BLOCK, axis=1)[:, :columns].astype(np.int64)
    with np.errstate(all="ignore"):
        scaled = rows * np.exp2(127.0 - spread).astype(np.float32)
    codes = q.rowwise.view(np.uint8).copy()
    codes[:total] = np.where(spread == 0xFF, 0x7F, octavo_numerics.cast(scaled.astype(np.float32), "e4m3"))
    return replace(q, rowwise=codes.view(q.rowwise.dtype), rowwise_scale=scale)


def _of_a_neighbour(scale: Any, direction: Direction) -> None:
    """Of each two blocks that follow one another in a sum, the second has the first one's scale, as where the stages of
    a pipeline are mixed up."""
    along = scale if direction == "columnwise" else scale.swapaxes(1, 2)
    pairs = along.shape[1] // 2
    along[:, 1 : 2 * pairs : 2] = along[:, 0 : 2 * pairs : 2]


def _transposed(scale: Any, _direction: Direction) -> None:
    """Two strides stand in each other's place."""
    count = min(scale.shape[1:])
    scale[:, :count, :count] = scale[:, :count, :count].swapaxes(1, 2).copy()


OF_OTHER_BLOCKS: dict[str, Callable[[Any, Direction], None]] = {
    "scale-of-a-neighbour": _of_a_neighbour,
    "transposed-scales": _transposed,
}
"""What moves scales [G, blocks, blocks] of other blocks to where a GEMM reads them, by the fault's name."""


def with_scales_of_other_blocks(q: QuantizedArray, direction: Direction, fault: str) -> QuantizedArray:
    """A weight of square blocks, of which the whole ones have others' scales. Partial blocks are right, as by another
    path."""
    size, name = q.spec.quantizer.block_size, f"{direction}_scale"
    if q.group_sizes is not None or not q.spec.quantizer.square or size is None:
        return q
    scale = getattr(q, name).copy()
    OF_OTHER_BLOCKS[fault](scale[:, : q.spec.shape[1] // size, : q.spec.shape[2] // size], direction)
    return replace(q, **{name: scale})

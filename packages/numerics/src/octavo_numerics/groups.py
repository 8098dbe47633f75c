"""The partition of rows into groups and blocks; reducing over scaling units and broadcasting their scales.

A scaling unit is a set of rows times a set of columns. Rows are taken one by one, in blocks that restart at each
group, or a group at a time; columns one by one, in blocks, or all at once. Every scaling of docs/numerics, in both
directions and square, is one of these nine products (see `units_of`).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from octavo import QuantizerSpec
from octavo.quantizer import HADAMARD_SIZE, Direction
from octavo_numerics.casts import F32

I64 = npt.NDArray[np.int64]
Array = npt.NDArray[Any]


@dataclass(frozen=True)
class RowPart:
    """A partition of the valid rows; parts that are empty (groups without rows) are allowed.

    index [U]   the part of each row
    start [P]   first row of each part
    size  [P]   rows of each part
    group [P]   group of each part
    """

    index: I64
    start: I64
    size: I64
    group: I64

    def maximum(self, values: F32) -> F32:
        """[U, C] to [P, C]: the maximum over each part, NaN winning, 0 where a part is empty."""
        if len(self.size) == len(self.index) and bool((self.size == 1).all()):
            return values
        out = np.zeros((len(self.size), values.shape[1]), dtype=values.dtype)
        filled = self.size > 0
        if values.size:
            out[filled] = np.maximum.reduceat(values, self.start[filled], axis=0)
        return out

    @cached_property
    def position(self) -> I64:
        """[U]: the place of each row within its part."""
        return np.arange(len(self.index), dtype=np.int64) - self.start[self.index]


class Groups:
    """Rows of a matrix split among groups by `sizes` [G]; stacked matrices are equal groups."""

    def __init__(self, sizes: I64) -> None:
        self.sizes = sizes
        self.count = len(sizes)
        self.rows = int(sizes.sum())

    def _part(self, sizes: I64, group: I64) -> RowPart:
        parts = np.arange(len(sizes), dtype=np.int64)
        return RowPart(index=np.repeat(parts, sizes), start=np.cumsum(sizes) - sizes, size=sizes, group=group)

    @cached_property
    def whole(self) -> RowPart:
        """One part per group, groups without rows included."""
        return self._part(self.sizes, np.arange(self.count, dtype=np.int64))

    @cached_property
    def each(self) -> RowPart:
        """One part per row."""
        return self._part(np.ones(self.rows, dtype=np.int64), self.whole.index)

    def blocks(self, size: int) -> RowPart:
        """Blocks of `size` rows that restart at each group, the last of a group partial, none in an empty group."""
        counts = self.block_counts(size)
        group = np.repeat(np.arange(self.count, dtype=np.int64), counts)
        place = np.arange(len(group), dtype=np.int64) - (np.cumsum(counts) - counts)[group]
        return self._part(np.minimum(self.sizes[group] - place * size, size), group)

    def block_counts(self, size: int) -> I64:
        """[G]: row blocks of each group."""
        return -(-self.sizes // size)

    def padded(self) -> Groups:
        """The groups after zero-padding each to a multiple of 16 rows, as the Hadamard transform takes them."""
        return Groups(self.block_counts(HADAMARD_SIZE) * HADAMARD_SIZE)

    def pad(self, values: F32) -> F32:
        """[U, C] to [padded U, C] with zero rows at the end of each group."""
        padded = self.padded()
        out = np.zeros((padded.rows, values.shape[1]), dtype=values.dtype)
        out[padded.whole.start[self.whole.index] + self.whole.position] = values
        return out


@dataclass(frozen=True)
class Units:
    """Scaling units: `rows` parts times runs of `width` of the `cols` columns, all of them where width is None."""

    rows: RowPart
    width: int | None
    cols: int

    @property
    def shape(self) -> tuple[int, int]:
        """(row parts, column parts)."""
        return len(self.rows.size), 1 if self.width is None else -(-self.cols // self.width)

    def maximum(self, values: F32) -> F32:
        """[U, C] to [row parts, column parts]: NaN wins, an empty unit has 0."""
        reduced = self.rows.maximum(values)
        out: F32
        if self.width is None:
            out = reduced.max(axis=1, initial=0, keepdims=True)
            return out
        if self.width == 1:
            return reduced
        rows, parts = self.shape
        if self.cols % self.width:
            reduced = np.pad(reduced, ((0, 0), (0, parts * self.width - self.cols)))
        out = reduced.reshape(rows, parts, self.width).max(axis=2, initial=0)
        return out

    def spread(self, scales: Array) -> Array:
        """[row parts, column parts] to [U, C]; to [U, 1] where a unit holds all columns."""
        if self.width is not None and self.width > 1:
            scales = np.repeat(scales, self.width, axis=1)[:, : self.cols]
        return scales[self.rows.index]


def units_of(spec: QuantizerSpec, direction: Direction, groups: Groups, cols: int) -> Units:
    """The scaling units of one plane. `groups` are the padded ones for Hadamard column data."""
    size = spec.block_size
    if spec.scaling in ("delayed", "current"):
        return Units(groups.whole, None, cols)
    if spec.scaling == "row":
        return Units(groups.each, None, cols) if direction == "rowwise" else Units(groups.whole, 1, cols)
    assert size is not None
    if spec.square_in(direction):
        return Units(groups.blocks(size), size, cols)
    return Units(groups.each, size, cols) if direction == "rowwise" else Units(groups.blocks(size), 1, cols)

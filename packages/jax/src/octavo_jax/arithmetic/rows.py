"""Which group and which block each row belongs to: ragged rows with traced sizes, or stacked matrices.

Both kinds offer the same operations, so that a quantizer is written once. `lead` is [M] or [G, N]; "blocks" run
along rows, restart at each group and are packed in group order; P is their static number.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from octavo import block_bound
from octavo_jax.arrays.sizes import group_ends
from octavo_jax.arrays.varying import varying_axes, varying_over


class Position(NamedTuple):
    """Row coordinates that random bits are keyed by, each broadcasting against `lead`."""

    group: Array
    row: Array


class Rows(Protocol):
    """How rows are split into groups and blocks."""

    groups: int

    @property
    def position(self) -> Position:
        """Group and row-within-group of each row."""

    def block_position(self, size: int) -> Position:
        """Group and block-within-group of each block, [P]."""

    def masked(self, x: Array) -> Array:
        """x with zeros in rows that belong to no group."""

    def panels(self, x: Array, size: int) -> Array:
        """[*lead, K] as blocks [P, size, K], zero-padded."""

    def unpanel(self, panels: Array, size: int) -> Array:
        """Blocks [P, size, K] back to [*lead, K]."""

    def from_blocks(self, per_block: Array, size: int) -> Array:
        """[P, ...] to [*lead, ...]: each row gets its block's entry."""

    def from_groups(self, per_group: Array) -> Array:
        """[G, ...] to an array that broadcasts against [*lead, ...]."""

    def blocks_from_groups(self, per_group: Array, size: int) -> Array:
        """[G, ...] to [P, ...]: each block gets its group's entry."""

    def group_largest(self, per_block: Array, size: int) -> Array:
        """[P, ...] uint32 to the maximum over each group's blocks, [G, ...]; 0 for a group without rows."""

    def block_scales(self, per_block: Array) -> Array:
        """[P, ...] in the shape that the plain layout stores."""


def _passed(ends: Array, index: Array) -> Array:
    """How many of `ends` each index has reached.

    Comparisons and a sum: one small kernel that XLA shares among the callers, where each binary search is a loop.
    """
    return jnp.sum(index[:, None] >= ends[None, :], axis=1, dtype=jnp.int32)


class _RowTable(NamedTuple):
    """Of M rows in G groups.

    ends, starts, sizes   [G], of each group's rows
    group                 [M], of each row; G in the tail
    position              of each row, [M]; the last group's in the tail
    """

    ends: Array
    starts: Array
    sizes: Array
    group: Array
    position: Position


class _BlockTable(NamedTuple):
    """Of blocks of `size` rows, which restart at each group; P is their bound.

    group             [P], of each block; G for blocks that no group needs
    position          of each block, [P]; the last group's where no group needs it
    first_of_row      [M]: the first block of each row's group
    rows, present     [P, size]: the row of each entry, and whether there is one
    """

    group: Array
    position: Position
    first_of_row: Array
    rows: Array
    present: Array


# A layer asks for the same tables a dozen times: jit traces and lowers them once.
@partial(jax.jit, static_argnames="rows")
def _row_table(group_sizes: Array, rows: int) -> _RowTable:
    ends = group_ends(group_sizes, rows)
    starts = jnp.concatenate([jnp.zeros(1, jnp.int32), ends[:-1]])
    row = jnp.arange(rows, dtype=jnp.int32)
    group = _passed(ends, row)
    clamped = jnp.minimum(group, group_sizes.shape[0] - 1)
    return _RowTable(ends, starts, ends - starts, group, Position(clamped, row - starts[clamped]))


@partial(jax.jit, static_argnames="size")
def _block_table(of_rows: _RowTable, size: int) -> _BlockTable:
    groups, rows = of_rows.ends.shape[0], of_rows.group.shape[0]
    ends = jnp.cumsum((of_rows.sizes + (size - 1)) // size).astype(jnp.int32)
    firsts = jnp.concatenate([jnp.zeros(1, jnp.int32), ends[:-1]])
    block = jnp.arange(block_bound(rows, groups, size), dtype=jnp.int32)
    group = _passed(ends, block)
    clamped = jnp.minimum(group, groups - 1)
    within = block - firsts[clamped]
    first_row = of_rows.starts[clamped] + within * size
    row = first_row[:, None] + jnp.arange(size, dtype=jnp.int32)[None, :]
    present = (row < of_rows.ends[clamped][:, None]) & (group < groups)[:, None]
    first_of_row = firsts[of_rows.position.group]
    return _BlockTable(group, Position(clamped, within), first_of_row, jnp.where(present, row, 0), present)


def _zeros(shape: tuple[int, ...], like: Array) -> Array:
    """Zeros in the dtype of `like`, which differ over the manual mesh axes that it differs over."""
    zeros: Array = varying_over(jnp.zeros(shape, like.dtype), varying_axes(like))
    return zeros


class RaggedRows:
    """M rows split among G groups by traced sizes; rows past the sum are a tail."""

    def __init__(self, group_sizes: Array, rows: int) -> None:
        self.groups = group_sizes.shape[0]
        self.rows = rows
        self._table: _RowTable = _row_table(group_sizes, rows)
        self._blocks: dict[int, _BlockTable] = {}

    @property
    def starts(self) -> Array:
        """The first row of each group, [G]."""
        return self._table.starts

    @property
    def sizes(self) -> Array:
        """The rows of each group, [G]."""
        return self._table.sizes

    @property
    def row_group(self) -> Array:
        """Group of each row, [M]; G in the tail."""
        return self._table.group

    @property
    def valid(self) -> Array:
        """True for rows that belong to a group, [M]."""
        return self._table.group < self.groups

    @property
    def position(self) -> Position:
        """Group and row-within-group of each row, [M]."""
        return self._table.position

    def bound(self, size: int) -> int:
        """P."""
        return block_bound(self.rows, self.groups, size)

    def _of_blocks(self, size: int) -> _BlockTable:
        if size not in self._blocks:
            self._blocks[size] = _block_table(self._table, size)
        return self._blocks[size]

    def block_group(self, size: int) -> Array:
        """Group of each block, [P]; G for blocks that no group needs."""
        return self._of_blocks(size).group

    def block_position(self, size: int) -> Position:
        """Group and block-within-group of each block, [P]."""
        return self._of_blocks(size).position

    def masked(self, x: Array) -> Array:
        """x [M, K] with zeros in the tail."""
        return jnp.where(self.valid.reshape(-1, *(1,) * (x.ndim - 1)), x, jnp.zeros((), x.dtype))

    def panels(self, x: Array, size: int) -> Array:
        """[M, K] as blocks [P, size, K], zero-padded."""
        if self.rows == 0:
            return _zeros((self.bound(size), size, *x.shape[1:]), x)
        blocks = self._of_blocks(size)
        return jnp.where(blocks.present[..., None], x[blocks.rows], jnp.zeros((), x.dtype))

    def unpanel(self, panels: Array, size: int) -> Array:
        """Blocks [P, size, K] back to [M, K], zeros in the tail."""
        if self.rows == 0 or panels.shape[0] == 0:
            return _zeros((self.rows, *panels.shape[2:]), panels)
        index = self._of_blocks(size).first_of_row * size + self.position.row
        flat = panels.reshape(panels.shape[0] * size, *panels.shape[2:])
        return self.masked(flat[jnp.where(self.valid, index, 0)])

    def from_blocks(self, per_block: Array, size: int) -> Array:
        """[P, ...] to [M, ...]."""
        if self.rows == 0 or per_block.shape[0] == 0:
            return _zeros((self.rows, *per_block.shape[1:]), per_block)
        block = self._of_blocks(size).first_of_row + self.position.row // size
        return per_block[jnp.where(self.valid, block, 0)]

    def from_groups(self, per_group: Array) -> Array:
        """[G, ...] to [M, ...]."""
        return per_group[self.position.group]

    def blocks_from_groups(self, per_group: Array, size: int) -> Array:
        """[G, ...] to [P, ...]."""
        return per_group[self.block_position(size).group]

    def group_largest(self, per_block: Array, size: int) -> Array:
        """[P, ...] uint32 to the maximum over each group's blocks, [G, ...]."""
        start = jnp.zeros((self.groups, *per_block.shape[1:]), jnp.uint32)
        return start.at[self.block_group(size)].max(per_block, mode="drop")

    def block_scales(self, per_block: Array) -> Array:
        """[P, ...] as it is."""
        return per_block


class StackedRows:
    """G matrices of N rows each, [G, N, K]; every block table is static."""

    def __init__(self, groups: int, rows: int) -> None:
        self.groups = groups
        self.rows = rows

    def _per_group(self, size: int) -> int:
        return -(-self.rows // size)

    @property
    def position(self) -> Position:
        """Group [G, 1] and row-within-group [1, N]."""
        group = jnp.arange(self.groups, dtype=jnp.int32)[:, None]
        return Position(group, jnp.arange(self.rows, dtype=jnp.int32)[None, :])

    def block_position(self, size: int) -> Position:
        """Group and block-within-group of each block, [P]."""
        count = self._per_group(size)
        block = np.arange(self.groups * count, dtype=np.int32)
        return Position(jnp.asarray(block // max(count, 1)), jnp.asarray(block % max(count, 1)))

    def masked(self, x: Array) -> Array:
        """x: every row belongs to a group."""
        return x

    def panels(self, x: Array, size: int) -> Array:
        """[G, N, K] as blocks [G * ceil(N / size), size, K], zero-padded."""
        count = self._per_group(size)
        padded = jnp.pad(x, ((0, 0), (0, count * size - self.rows), (0, 0)))
        return padded.reshape(self.groups * count, size, x.shape[2])

    def unpanel(self, panels: Array, size: int) -> Array:
        """Blocks back to [G, N, K]."""
        return panels.reshape(self.groups, self._per_group(size) * size, panels.shape[2])[:, : self.rows]

    def from_blocks(self, per_block: Array, size: int) -> Array:
        """[P, ...] to [G, N, ...]."""
        stacked = per_block.reshape(self.groups, self._per_group(size), *per_block.shape[1:])
        return jnp.repeat(stacked, size, axis=1)[:, : self.rows]

    def from_groups(self, per_group: Array) -> Array:
        """[G, ...] to [G, 1, ...]."""
        return per_group[:, None]

    def blocks_from_groups(self, per_group: Array, size: int) -> Array:
        """[G, ...] to [P, ...]."""
        return jnp.repeat(per_group, self._per_group(size), axis=0)

    def group_largest(self, per_block: Array, size: int) -> Array:
        """[P, ...] uint32 to [G, ...]."""
        stacked = per_block.reshape(self.groups, self._per_group(size), *per_block.shape[1:])
        return jnp.max(stacked, axis=1, initial=np.uint32(0))

    def block_scales(self, per_block: Array) -> Array:
        """[P, ...] as [G, ceil(N / size), ...]."""
        return per_block.reshape(self.groups, per_block.shape[0] // self.groups, *per_block.shape[1:])

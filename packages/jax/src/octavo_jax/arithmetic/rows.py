"""Which group and which block each row belongs to: ragged rows with traced sizes, or stacked matrices.

Both kinds offer the same operations, so that a quantizer is written once. `lead` is [M] or [G, N]; "blocks" run
along rows, restart at each group and are packed in group order; P is their static number.
"""

from __future__ import annotations

from functools import cached_property
from typing import NamedTuple, Protocol

import jax.numpy as jnp
import numpy as np
from jax import Array

from octavo import block_bound
from octavo_jax.arrays.sizes import group_ends


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


class RaggedRows:
    """M rows split among G groups by traced sizes; rows past the sum are a tail."""

    def __init__(self, group_sizes: Array, rows: int) -> None:
        self.groups = group_sizes.shape[0]
        self.rows = rows
        self.ends = group_ends(group_sizes, rows)
        self.starts = jnp.concatenate([jnp.zeros(1, jnp.int32), self.ends[:-1]])
        self.sizes = self.ends - self.starts
        self._tables: dict[int, tuple[Array, Array, Array]] = {}

    @cached_property
    def row_group(self) -> Array:
        """Group of each row, [M]; G in the tail."""
        return _passed(self.ends, jnp.arange(self.rows, dtype=jnp.int32))

    @cached_property
    def _clamped(self) -> Array:
        return jnp.minimum(self.row_group, self.groups - 1)

    @cached_property
    def valid(self) -> Array:
        """True for rows that belong to a group, [M]."""
        return self.row_group < self.groups

    @cached_property
    def position(self) -> Position:
        """Group and row-within-group of each row, [M]."""
        return Position(self._clamped, jnp.arange(self.rows, dtype=jnp.int32) - self.starts[self._clamped])

    def bound(self, size: int) -> int:
        """P."""
        return block_bound(self.rows, self.groups, size)

    def _blocks(self, size: int) -> tuple[Array, Array, Array]:
        """(first block of each group [G], group of each block [P], block within its group [P])."""
        if size not in self._tables:
            ends = jnp.cumsum((self.sizes + (size - 1)) // size).astype(jnp.int32)
            firsts = jnp.concatenate([jnp.zeros(1, jnp.int32), ends[:-1]])
            blocks = jnp.arange(self.bound(size), dtype=jnp.int32)
            group = _passed(ends, blocks)
            within = blocks - firsts[jnp.minimum(group, self.groups - 1)]
            self._tables[size] = (firsts, group, within)
        return self._tables[size]

    def block_group(self, size: int) -> Array:
        """Group of each block, [P]; G for blocks that no group needs."""
        return self._blocks(size)[1]

    def block_position(self, size: int) -> Position:
        """Group and block-within-group of each block, [P]."""
        _, group, within = self._blocks(size)
        return Position(jnp.minimum(group, self.groups - 1), within)

    def panel_rows(self, size: int) -> tuple[Array, Array]:
        """(row of each panel entry [P, size], True where there is one)."""
        _, group, within = self._blocks(size)
        clamped = jnp.minimum(group, self.groups - 1)
        first = self.starts[clamped] + within * size
        rows = first[:, None] + jnp.arange(size, dtype=jnp.int32)[None, :]
        present = (rows < self.ends[clamped][:, None]) & (group < self.groups)[:, None]
        return jnp.where(present, rows, 0), present

    def masked(self, x: Array) -> Array:
        """x [M, K] with zeros in the tail."""
        return jnp.where(self.valid.reshape(-1, *(1,) * (x.ndim - 1)), x, jnp.zeros((), x.dtype))

    def panels(self, x: Array, size: int) -> Array:
        """[M, K] as blocks [P, size, K], zero-padded."""
        rows, present = self.panel_rows(size)
        if self.rows == 0:
            return jnp.zeros((self.bound(size), size, *x.shape[1:]), x.dtype)
        return jnp.where(present[..., None], x[rows], jnp.zeros((), x.dtype))

    def unpanel(self, panels: Array, size: int) -> Array:
        """Blocks [P, size, K] back to [M, K], zeros in the tail."""
        if self.rows == 0 or panels.shape[0] == 0:
            return jnp.zeros((self.rows, *panels.shape[2:]), panels.dtype)
        firsts = self._blocks(size)[0]
        index = firsts[self._clamped] * size + self.position.row
        flat = panels.reshape(-1, *panels.shape[2:])
        return self.masked(flat[jnp.where(self.valid, index, 0)])

    def from_blocks(self, per_block: Array, size: int) -> Array:
        """[P, ...] to [M, ...]."""
        if self.rows == 0 or per_block.shape[0] == 0:
            return jnp.zeros((self.rows, *per_block.shape[1:]), per_block.dtype)
        firsts = self._blocks(size)[0]
        return per_block[jnp.where(self.valid, firsts[self._clamped] + self.position.row // size, 0)]

    def from_groups(self, per_group: Array) -> Array:
        """[G, ...] to [M, ...]."""
        return per_group[self._clamped]

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

"""Which group, block and position each row has: index arithmetic on the device, with static shapes.

Rows of a ragged [M, K] operand stand together in group order; rows past the sum of the sizes are a tail. Stacked
matrices [G, N, K] are the ragged case whose sizes are all N.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from octavo import block_bound


def bounded_sizes(group_sizes: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """int64 sizes that are not negative and sum to at most `rows`, and a bool scalar: were they changed?

    Nothing is read back. A negative size counts as 0; from the group that passes `rows` on, rows are cut off.
    """
    wide = group_sizes.to(torch.int64)
    ends = wide.clamp(0, rows).cumsum(0).clamp(max=rows)
    sizes = torch.diff(ends, prepend=ends.new_zeros(1))
    return sizes, (sizes != wide).any()


@dataclass(frozen=True)
class Segments:
    """A partition of the rows.

    index   int64 [M]: the segment of each row; `count` for rows of the tail
    count   how many segments there may be
    """

    index: Tensor
    count: int


class RowGroups:
    """Rows [M] in groups [G] on one device.

    sizes, starts, ends   int64 [G], already bounded
    group                 int64 [M]: the row's group, G for the tail
    uniform               every group's static size, for stacked matrices; None for ragged rows
    """

    def __init__(self, sizes: Tensor, rows: int, uniform: int | None = None) -> None:
        self.sizes = sizes
        self.rows = rows
        self.uniform = uniform
        self.count = sizes.shape[0]
        self.ends = sizes.cumsum(0)
        self.starts = self.ends - sizes
        self.row = torch.arange(rows, device=sizes.device)
        self.group = torch.searchsorted(self.ends, self.row, right=True)

    @classmethod
    def stacked(cls, groups: int, rows: int, device: torch.device) -> RowGroups:
        """[G, N, K] matrices seen as G groups of N rows."""
        sizes = torch.full((groups,), rows, dtype=torch.int64, device=device)
        return cls(sizes, groups * rows, uniform=rows)

    @cached_property
    def valid(self) -> Tensor:
        """bool [M]: false in the tail."""
        return self.group < self.count

    @cached_property
    def safe_group(self) -> Tensor:
        """The row's group, the last one for the tail: an index that is always in bounds."""
        return self.group.clamp(max=self.count - 1)

    @cached_property
    def local(self) -> Tensor:
        """int64 [M]: the row's position within its group."""
        return self.row - self.starts[self.safe_group]

    def blocks_of(self, size: int) -> tuple[Tensor, Tensor]:
        """Two int64 [G]: the number of row blocks of each group, and the packed index of its first block."""
        number = (self.sizes + (size - 1)) // size
        return number, number.cumsum(0) - number

    def group_of_blocks(self, size: int, count: int) -> Tensor:
        """int64 [count]: the group of each packed block of `size` rows; the last group for blocks past the last one."""
        number, first = self.blocks_of(size)
        block = torch.arange(count, device=self.sizes.device)
        return torch.searchsorted(first + number, block, right=True).clamp_(max=self.count - 1)

    def by_block(self, size: int) -> Segments:
        """One segment for each block of `size` rows; blocks restart at each group."""
        count = block_bound(self.rows, self.count, size)
        _, first = self.blocks_of(size)
        index = first[self.safe_group] + self.local // size
        return Segments(torch.where(self.valid, index, count), count)

    def panels(self, size: int) -> tuple[Tensor, Tensor, Tensor]:
        """Blocks of `size` rows as gather indices, unused blocks and rows past a group's end masked.

        Returns rows int64 [P, size] (in bounds), real bool [P, size], and each block's group int64 [P] (G: unused),
        with P = octavo.block_bound(M, G, size).
        """
        number, first = self.blocks_of(size)
        block = torch.arange(block_bound(self.rows, self.count, size), device=self.sizes.device)
        group = torch.searchsorted(first + number, block, right=True)
        safe = group.clamp(max=self.count - 1)
        rows = (self.starts[safe] + (block - first[safe]) * size)[:, None] + torch.arange(size, device=block.device)
        real = (rows < self.ends[safe][:, None]) & (group < self.count)[:, None]
        return rows.clamp(max=max(self.rows - 1, 0)), real, group

    def padded(self, size: int) -> RowGroups:
        """The same groups, each zero-padded to a multiple of `size` rows and packed."""
        number, _ = self.blocks_of(size)
        return RowGroups(number * size, block_bound(self.rows, self.count, size) * size)


def segment_amax(bits: Tensor, groups: RowGroups, block: int | None) -> Tensor:
    """Largest non-negative int32 of each row segment and column: [M, C] to [blocks or G, C]; 0 for empty segments.

    block   rows a segment: blocks of that many rows, restarting at each group; None: a segment is a whole group
    """
    columns = bits.shape[1]
    if groups.uniform is not None:
        stacked = bits.view(groups.count, groups.uniform, columns)
        if block is None:
            return _amax(stacked, 1)
        short = -groups.uniform % block
        padded = torch.nn.functional.pad(stacked, (0, 0, 0, short)) if short else stacked
        blocks = groups.count * (padded.shape[1] // block)
        return _amax(padded.reshape(blocks, block, columns), 1)
    if block is None:
        # blocks first where rows are wide: a scatter of whole rows is much slower than a gather
        if columns > 1:
            _, _, group = groups.panels(_PANEL)
            return _scatter_amax(segment_amax(bits, groups, _PANEL), group, groups.count)
        return _scatter_amax(bits, groups.group, groups.count)
    rows, real, _ = groups.panels(block)
    if not groups.rows:
        return bits.new_zeros((rows.shape[0], columns))
    panel = bits.index_select(0, rows.reshape(-1)).view(*rows.shape, columns)
    return panel.masked_fill_(~real[:, :, None], 0).amax(1)


_PANEL = 64


def _amax(value: Tensor, dim: int) -> Tensor:
    """amax that gives 0 over an empty axis."""
    if value.shape[dim]:
        return value.amax(dim)
    return value.new_zeros([size for axis, size in enumerate(value.shape) if axis != dim])


def _scatter_amax(bits: Tensor, index: Tensor, count: int) -> Tensor:
    target = bits.new_zeros((count + 1, bits.shape[1]))
    return target.scatter_reduce_(0, index[:, None].expand_as(bits), bits, "amax")[:count]

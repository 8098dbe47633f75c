"""Units: the elements that share a scale, for every scaling and direction; their amax, and their values spread back.

A unit is a segment of rows (each row, a block, a group) times a segment of columns (each column, a block, all).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from octavo import QuantizerSpec
from octavo.quantizer import Direction
from octavo_torch.arithmetic.casts import ABS_BITS, bits_of
from octavo_torch.arithmetic.groups import RowGroups, segment_amax


@dataclass(frozen=True)
class Units:
    """Which elements share a scale. rows: "each", "group" or a block size; columns: "each", "all" or a block size."""

    rows: Literal["each", "group"] | int
    columns: Literal["each", "all"] | int


PER_GROUP = Units("group", "all")


def units_of(spec: QuantizerSpec, direction: Direction) -> Units:
    """The units of one direction, as the table in GroupedTensorSpec lays them out."""
    size = spec.block_size
    if spec.scaling in ("delayed", "current"):
        return PER_GROUP
    if size is None:
        return Units("each", "all") if direction == "rowwise" else Units("group", "each")
    if spec.square_in(direction):
        return Units(size, size)
    return Units("each", size) if direction == "rowwise" else Units(size, "each")


def unit_amax(x: Tensor, groups: RowGroups, units: Units) -> Tensor:
    """int32 bit patterns of each unit's amax, [row segments, column segments]."""
    bits = bits_of(x) & ABS_BITS
    if units.columns == "all":
        bits = bits.amax(1, keepdim=True) if x.shape[1] else bits.new_zeros((x.shape[0], 1))
    elif units.columns != "each":
        short = -x.shape[1] % units.columns
        padded = torch.nn.functional.pad(bits, (0, short)) if short else bits
        bits = padded.view(x.shape[0], padded.shape[1] // units.columns, units.columns).amax(2)
    if units.rows == "each":
        return bits
    return segment_amax(bits, groups, None if units.rows == "group" else units.rows)


class Spread:
    """Carries values of units [S, C] back over the elements [M, K]."""

    def __init__(self, units: Units, groups: RowGroups, columns: int) -> None:
        self.columns = columns
        self.width = 1 if isinstance(units.columns, str) else units.columns
        self.index: Tensor | None = None
        if units.rows == "group":
            self.index = groups.safe_group
        elif units.rows != "each":
            self.index = groups.by_block(units.rows).index

    def __call__(self, value: Tensor) -> Tensor:
        """[S, C] to [M, K], or [M, 1] where one unit spans all columns."""
        if self.index is not None:
            # the tail's segment lies past the last unit; what it reads is masked
            value = value.index_select(0, self.index.clamp(max=max(value.shape[0] - 1, 0)))
        if self.width > 1:
            value = value.unsqueeze(2).expand(-1, -1, self.width).flatten(1)[:, : self.columns]
        return value


def group_of_units(units: Units, groups: RowGroups, segments: int) -> Tensor:
    """int64 [segments]: the group of each row segment of the units, which are each row's or each block's."""
    return groups.safe_group if units.rows == "each" else groups.group_of_blocks(int(units.rows), segments)

"""GroupedTensorSpec: the shapes of a quantized grouped tensor, padding included."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, NonNegativeInt, PositiveInt, model_validator

from octavo.quantizer import HADAMARD_SIZE, Direction, Orientation, QuantizerSpec
from octavo.schema import Schema

PLAIN = "plain"
"""The layout that every package understands: x's own orientation, one code per byte, nothing swizzled."""


def block_bound(rows: int, groups: int, size: int) -> int:
    """Upper bound on the row blocks of `size` rows for `rows` rows in `groups` groups; blocks restart at each group."""
    return (rows + (size - 1) * groups) // size


class GroupedTensorSpec(Schema):
    """Logical shape and layout of a quantized tensor; the arrays' shapes follow from it alone.

    shape               [M, K] when ragged_axis is 0, [G, N, K] when it is None (each group its own matrix)
    groups              G
    ragged_axis         0: rows of one matrix are split among the groups by `group_sizes`, rows past the sum are a tail
    quantizer           how the tensor was quantized; its orientation says which planes exist
    rowwise_layout      layout of the rowwise payload and scales
    columnwise_layout   layout of the columnwise payload and scales

    The plain layout. Payload: `shape`, one code per byte in x's orientation; Hadamard column data have
    `block_bound(M, G, 16) * 16` rows, because each group is padded to 16 rows. Scales:

    | scaling | ragged rowwise | ragged columnwise | stacked rowwise | stacked columnwise |
    |---|---|---|---|---|
    | delayed, current | [G] | [G] | [G] | [G] |
    | row | [M] | [G, K] | [G, N] | [G, K] |
    | blocks of B | [M, ceil(K/B)] | [block_bound(M, G, B), K] | [G, N, ceil(K/B)] | [G, ceil(N/B), K] |
    | square blocks of B | [block_bound(M, G, B), ceil(K/B)] | the same array | [G, ceil(N/B), ceil(K/B)] | the same |

    With `square_columns` the columnwise scales are those of square blocks, and the rowwise ones those of blocks.

    Blocks along ragged rows restart at each group and are packed in group order: those of group g begin at
    sum over h < g of ceil(size_h / B), and empty groups have none. NVFP4 adds a second-level factor [G] per plane.
    """

    shape: tuple[NonNegativeInt, ...]
    groups: PositiveInt
    quantizer: QuantizerSpec
    ragged_axis: Literal[0] | None = 0
    rowwise_layout: str = Field(default=PLAIN, min_length=1)
    columnwise_layout: str = Field(default=PLAIN, min_length=1)

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        rank = 2 if self.ragged_axis == 0 else 3
        if len(self.shape) != rank:
            kind = "a ragged tensor has shape [M, K]" if rank == 2 else "stacked matrices have shape [G, N, K]"
            raise ValueError(f"shape={list(self.shape)} has {len(self.shape)} axes; {kind}")
        if rank == 3 and self.shape[0] != self.groups:
            raise ValueError(
                f"shape={list(self.shape)} holds {self.shape[0]} matrices, but groups={self.groups}; "
                "give one matrix per group"
            )
        if rank == 3 and self.quantizer.hadamard:
            raise ValueError(
                "hadamard=True is defined for ragged [M, K] operands only; set hadamard=False for stacked matrices"
            )
        return self

    @property
    def orientation(self) -> Orientation:
        """Which planes exist."""
        return self.quantizer.orientation

    @property
    def row_alignment(self) -> int:
        """Rows to which each group is padded inside the plain columnwise payload."""
        return HADAMARD_SIZE if self.quantizer.hadamard else 1

    def payload_shape(self, direction: Direction) -> tuple[int, ...]:
        """Shape of one plane's plain payload."""
        if direction == "columnwise" and self.row_alignment > 1:
            align = self.row_alignment
            return (block_bound(self.shape[0], self.groups, align) * align, self.shape[1])
        return self.shape

    def scale_shape(self, direction: Direction) -> tuple[int, ...]:
        """Shape of one plane's plain decode scales."""
        *_, rows, cols = self.shape
        lead = () if self.ragged_axis == 0 else (self.groups,)
        size = self.quantizer.block_size
        if self.quantizer.scaling in ("delayed", "current"):
            return (self.groups,)
        if size is None:
            return (*lead, rows) if direction == "rowwise" else (self.groups, cols)
        row_blocks = block_bound(rows, self.groups if self.ragged_axis == 0 else 1, size)
        col_blocks = -(-cols // size)
        if self.quantizer.square_in(direction):
            return (*lead, row_blocks, col_blocks)
        return (*lead, rows, col_blocks) if direction == "rowwise" else (*lead, row_blocks, cols)


def check_group_sizes(sizes: list[int] | tuple[int, ...], rows: int) -> None:
    """Raise ValueError if one of the host `sizes` is negative or their sum exceeds `rows`."""
    for index, size in enumerate(sizes):
        if size < 0:
            raise ValueError(f"group_sizes[{index}] is {size}; sizes are zero or more")
    total = sum(sizes)
    if total > rows:
        raise ValueError(
            f"group_sizes sum to {total} and the tensor has {rows} rows; the sum may be at most the rows "
            "(rows past the sum are a tail that is never read)"
        )

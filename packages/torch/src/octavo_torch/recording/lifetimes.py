"""Memory for arrays that a pass reads and writes for a while."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

ALIGNMENT = 256
"""Bytes at a multiple of which kernels' workspaces begin."""

SMALL = 1 << 20
"""Bytes of an array up to which it is not worth an allocation of its own."""


class Lifetime(NamedTuple):
    """An array by its number, and the numbers of the first and of the last launch that reads or writes it.

    start   the address that it had when it was written down: it always lies at the same remainder by ALIGNMENT
    """

    number: int
    start: int
    size: int
    first: int
    last: int

    @property
    def remainder(self) -> int:
        """Of its address by ALIGNMENT."""
        return self.start % ALIGNMENT

    def meets(self, other: Lifetime) -> bool:
        """Whether both are in use at the same time."""
        return self.first <= other.last and other.first <= self.last


class Block(NamedTuple):
    """Memory that begins at a multiple of ALIGNMENT, for arrays of which those in use at the same time do not overlap.

    size      bytes
    offsets   of the arrays, by their numbers
    """

    size: int
    offsets: list[tuple[int, int]]


def block_of(arrays: Iterable[Lifetime]) -> Block:
    """The block of these arrays: the largest are placed first, each at the lowest offset at which it fits."""
    placed: list[tuple[int, int, Lifetime]] = []
    for array in sorted(arrays, key=lambda array: -array.size):
        offset = array.remainder
        for begin, end, other in sorted(placed):
            if array.meets(other) and begin < offset + array.size and offset < end:
                offset = -(-end // ALIGNMENT) * ALIGNMENT + array.remainder
        placed.append((offset, offset + array.size, array))
    size = max((end for _, end, _ in placed), default=0)
    return Block(size, [(array.number, begin) for begin, _, array in placed])

"""Blocks: memory for arrays that a pass reads and writes for a while, few allocations for many of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

ALIGNMENT = 256
"""Bytes at a multiple of which kernels' workspaces begin."""

SMALL = 1 << 20
"""Bytes of an array up to which it is not worth an allocation of its own."""


class Lifetime(NamedTuple):
    """An array by its number, and the numbers of the first and of the last launch that reads or writes it.

    start   the address that it had when it was written down: in a block it lies at the same remainder by ALIGNMENT
    """

    number: int
    start: int
    size: int
    first: int
    last: int

    def meets(self, other: Lifetime) -> bool:
        """Whether both are in use at the same time."""
        return self.first <= other.last and other.first <= self.last


class Block(NamedTuple):
    """Memory that begins at a multiple of ALIGNMENT, allocated before one part of a pass and freed after another.

    size      bytes
    offsets   of the arrays in it, by their numbers; those that are in use at the same time do not overlap
    """

    first_part: int
    last_part: int
    size: int
    offsets: list[tuple[int, int]]


def blocks_for(arrays: Iterable[Lifetime], ends: Sequence[int]) -> list[Block]:
    """The blocks of a pass whose parts end before the launches of these numbers.

    Small arrays share a block for the whole pass. A large one shares the block of the one part that uses it, or has its
    own from the first part that uses it to the last.
    """
    together: dict[tuple[int, int, int | None], list[Lifetime]] = {}
    for array in arrays:
        first, last = _part_of(array.first, ends), _part_of(array.last, ends)
        own = None if first == last else array.number
        together.setdefault((first, last, own) if array.size >= SMALL else (0, len(ends) - 1, None), []).append(array)
    return [Block(first, last, *_packed(inside)) for (first, last, _), inside in together.items()]


def _part_of(launch: int, ends: Sequence[int]) -> int:
    return next(part for part, end in enumerate(ends) if launch < end)


def _packed(arrays: list[Lifetime]) -> tuple[int, list[tuple[int, int]]]:
    """Bytes and offsets: the largest arrays are placed first, each at the lowest offset at which it fits."""
    placed: list[tuple[int, int, Lifetime]] = []
    for array in sorted(arrays, key=lambda array: -array.size):
        spare = array.start % ALIGNMENT
        offset = spare
        for begin, end, other in sorted(placed):
            if array.meets(other) and begin < offset + array.size and offset < end:
                offset = -(-end // ALIGNMENT) * ALIGNMENT + spare
        placed.append((offset, offset + array.size, array))
    return max(end for _, end, _ in placed), [(array.number, begin) for begin, _, array in placed]

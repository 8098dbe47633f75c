"""The matrices in an operand: a ragged one holds one for each group, a stacked one has them ready."""

from __future__ import annotations

from collections.abc import Iterator

from octavo import check_group_sizes
from torch import Tensor


def host_sizes(group_sizes: Tensor, rows: int) -> list[int]:
    """The sizes as checked integers. They are in host memory, as the card asks, so reading them waits for nothing."""
    sizes = [int(size) for size in group_sizes.tolist()]
    check_group_sizes(sizes, rows)
    return sizes


def spans(sizes: list[int]) -> Iterator[slice]:
    """The rows of each group, in order; rows past the last one are the tail, which nobody reads."""
    start = 0
    for size in sizes:
        yield slice(start, start + size)
        start += size

"""The matrices in an operand: a ragged one holds one for each group, a stacked one has them ready."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from octavo import check_group_sizes


def host_sizes(group_sizes: Tensor, rows: int) -> list[int]:
    """The sizes as checked integers. On the CPU they are in host memory anyway, so reading them waits for nothing."""
    sizes = [int(size) for size in group_sizes.tolist()]
    check_group_sizes(sizes, rows)
    return sizes


def spans(sizes: list[int]) -> Iterator[slice]:
    """The rows of each group, in order; rows past the last one are the tail, which nobody reads."""
    start = 0
    for size in sizes:
        yield slice(start, start + size)
        start += size

"""Weights whose gate and up rows are interleaved in blocks, beside the same weights with the gate half first."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from octavo_conformance.problems.inputs import Array, Rng

NOT_OF_32 = (3, 9, 12, 24, 36)
"""Blocks that are no divisor of 32: halves of 72 rows."""

ROWS, MORE_ROWS = 144, 256
"""Rows of a weight in most of these tests, two blocks of 64 in each half of the other."""


def blocks_and_rows(rng: Rng) -> Iterator[tuple[int, int]]:
    """(rows of a block, rows of the weight): single rows, few, one block that is no divisor of 32, and many."""
    yield from ((block, ROWS) for block in (1, 2, 8, int(rng.choice(NOT_OF_32))))
    yield 64, MORE_ROWS


def interleaved(halves: Array, block: int, axis: int) -> Array:
    """`halves`, whose gate half comes first along `axis`, with blocks of gate and up interleaved."""
    numbers = np.arange(halves.shape[axis]).reshape(2, -1, block)
    return np.ascontiguousarray(np.take(halves, numbers.swapaxes(0, 1).ravel(), axis))


def check_none(answer: object, block: int) -> bool:
    """Whether a block is left to the front end; single rows, as published models have them, are not."""
    assert answer is not None or block != 1, (
        "interleaved is offered and answers None for blocks of one row; serve those"
    )
    return answer is None

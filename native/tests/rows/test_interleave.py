"""interleave_halves on the CPU, against numpy; guarded arrays see every stray write."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from guarded import Array, Guarded, put

import octavo_native as native


def interleaved(halves: Array) -> Array:
    """[rows, 2, blocks, bytes] as [rows, blocks, 2, bytes]."""
    return np.ascontiguousarray(halves.swapaxes(1, 2))


@pytest.mark.parametrize("size", [1, 2, 4, 8])
@pytest.mark.parametrize("threads", [1, 3])
def test_halves_take_turns_and_back(size: int, threads: int, rng: np.random.Generator) -> None:
    """Blocks of any number of elements, one among them and all of a half, rows of any length, starts of any alignment:
    every byte goes where the contract has it, and nothing else is written."""
    for _ in range(12):
        rows, block = int(rng.integers(0, 40)), int(rng.choice([1, 2, 3, 8, 129]))
        blocks = int(rng.choice([0, 1, 7, 64, 301]))
        halves = rng.integers(0, 256, (rows, 2, blocks, block * size), np.uint8)
        start = size * int(rng.integers(0, 3))
        for given, interleave in ((halves, True), (interleaved(halves), False)):
            source = put(np.concatenate([np.zeros(start, np.uint8), given.reshape(-1)]))
            out = Guarded((given.size,), np.uint8)
            native.interleave_halves(
                cuda=False, from_=source.address + start, into=out.address, rows=rows, blocks=blocks,
                block_bytes=block * size, interleave=interleave, threads=threads,
            )  # fmt: skip
            expected = interleaved(halves) if interleave else halves
            assert (out.bytes == expected.reshape(-1)).all(), (rows, blocks, block, start, interleave)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"rows": -1}, "rows or blocks is negative"),
    ({"blocks": -1}, "rows or blocks is negative"),
    ({"block_bytes": 0}, "block_bytes is less than 1"),
    ({"rows": (1 << 30) + 1}, "rows is past 2\\^30"),
    ({"blocks": 1 << 29, "block_bytes": 4}, "half a row is past 2\\^30 bytes"),
    ({"block_bytes": 1 << 62}, "half a row is past 2\\^30 bytes"),
    ({"from_": 0}, "from_ or into is null"),
    ({"into": 0}, "from_ or into is null"),
    ({"into": 1024 + 23}, "from_ and into overlap"),
    ({"into": 1024 - 23}, "from_ and into overlap"),
    ({"threads": -1}, "threads is negative"),
]


@pytest.mark.parametrize(("change", "word"), REFUSED)
def test_bad_arguments_are_refused(change: dict[str, Any], word: str) -> None:
    """Numbers that no arrays have, and arrays of which one would be read after it was written; nothing is followed."""
    given: dict[str, Any] = {"from_": 1024, "into": 2048, "rows": 2, "blocks": 3, "block_bytes": 2, "interleave": True}
    with pytest.raises(ValueError, match=word):
        native.interleave_halves(cuda=False, **(given | change))

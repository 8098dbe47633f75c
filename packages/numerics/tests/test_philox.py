"""Philox4x32-10 against the known answers that Random123 publishes."""

from __future__ import annotations

import numpy as np
import pytest

from octavo_numerics import philox4x32
from octavo_numerics.philox import split_seed

KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "words"), KNOWN)
def test_known_answers(counter: tuple[int, ...], key: tuple[int, int], words: tuple[int, ...]) -> None:
    """kat_vectors of Random123, "philox4x32 10"."""
    c0, c1, c2, c3 = (np.array([word], dtype=np.uint32) for word in counter)
    assert tuple(int(word[0]) for word in philox4x32((c0, c1, c2, c3), key)) == words


def test_counters_broadcast() -> None:
    """A grid of counters gives each what it gives alone."""
    rows, cols = np.arange(3, dtype=np.uint32)[:, None], np.arange(5, dtype=np.uint32)[None, :]
    zero = np.zeros(1, dtype=np.uint32)
    grid = philox4x32((rows, cols, zero, zero), (1, 2))
    alone = philox4x32((rows[2], cols[0, 4:], zero, zero), (1, 2))
    assert grid[0].shape == (3, 5)
    assert [int(word[2, 4]) for word in grid] == [int(word[0]) for word in alone]


def test_seeds_are_taken_modulo_2_to_the_64() -> None:
    """Low word first; negative and oversized seeds wrap."""
    assert split_seed(0x0123456789ABCDEF) == (0x89ABCDEF, 0x01234567)
    assert split_seed(-1) == (0xFFFFFFFF, 0xFFFFFFFF)
    assert split_seed((1 << 64) + 5) == (5, 0)

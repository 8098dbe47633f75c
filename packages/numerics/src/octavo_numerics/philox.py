"""Philox4x32-10, the counter-based generator of stochastic rounding.

Source: Salmon, Moraes, Dror, Shaw, "Parallel Random Numbers: As Easy as 1, 2, 3" (SC 2011), section 3.3 and table 2;
constants and word order as in Random123.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

U32 = npt.NDArray[np.uint32]

_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
_MASK = 0xFFFFFFFF


def philox4x32(counter: tuple[U32, U32, U32, U32], key: tuple[int, int]) -> tuple[U32, U32, U32, U32]:
    """Output words 0 to 3 for counter words c0 to c3 (arrays that broadcast) and the two key words."""
    shape = np.broadcast_shapes(*(word.shape for word in counter))
    c0, c1, c2, c3 = (np.broadcast_to(word, shape).astype(np.uint32) for word in counter)
    low, high = key
    for _ in range(_ROUNDS):
        first = c0.astype(np.uint64) * _MULTIPLIERS[0]
        second = c2.astype(np.uint64) * _MULTIPLIERS[1]
        c0 = (second >> np.uint64(32)).astype(np.uint32) ^ c1 ^ np.uint32(low)
        c2 = (first >> np.uint64(32)).astype(np.uint32) ^ c3 ^ np.uint32(high)
        c1, c3 = second.astype(np.uint32), first.astype(np.uint32)
        low, high = (low + _WEYL[0]) & _MASK, (high + _WEYL[1]) & _MASK
    return c0, c1, c2, c3


def split_seed(seed: int) -> tuple[int, int]:
    """Key words (low, high) of a seed, which is taken modulo 2^64."""
    return seed & _MASK, (seed >> 32) & _MASK

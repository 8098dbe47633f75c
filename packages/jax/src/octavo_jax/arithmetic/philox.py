"""Philox4x32-10 (Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", SC11) and the bits of an element."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jax import Array

from octavo_jax.arithmetic.barrier import barrier
from octavo_jax.arithmetic.elements import elements, elementwise, plain

_MULTIPLIERS = (np.uint32(0xD2511F53), np.uint32(0xCD9E8D57))
_WEYL = (np.uint32(0x9E3779B9), np.uint32(0xBB67AE85))
_ROUNDS = 10


@elementwise
def _high(a: Array, b: np.uint32) -> Array:
    """The upper 32 bits of a * b."""
    a1, a0, b1, b0 = a >> 16, a & 0xFFFF, b >> 16, b & 0xFFFF
    first = a0 * b1 + ((a0 * b0) >> 16)
    second = a1 * b0 + (first & 0xFFFF)
    return a1 * b1 + (first >> 16) + (second >> 16)


def philox(key: Array, counter: tuple[Array, Array, Array, Array]) -> tuple[Array, Array, Array, Array]:
    """Four words for each counter. key: uint32 [2], low word first; counter words broadcast against each other."""
    c0, c1, c2, c3 = map(elements, jnp.broadcast_arrays(*counter))
    k0, k1 = elements(key[0]), elements(key[1])
    for _ in range(_ROUNDS):
        high0, low0 = _high(c0, _MULTIPLIERS[0]), c0 * _MULTIPLIERS[0]
        high1, low1 = _high(c2, _MULTIPLIERS[1]), c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = k0 + _WEYL[0], k1 + _WEYL[1]
    return plain(c0), plain(c1), plain(c2), plain(c3)


def block_bits(key: Array, outer: Array, block: Array, stream: int, operand: int, group: Array) -> Array:
    """The 16 random bits of each of a block's 16 elements: uint32, [16, *counters' shape].

    outer, block and group broadcast against each other. Halves and words lead, so that XLA:CPU vectorises the rounds.
    """
    outer, block, group = jnp.broadcast_arrays(outer, block, group)
    half = jnp.arange(2, dtype=jnp.uint32).reshape(2, *(1,) * outer.ndim)
    words = philox(key, (outer[None], block[None], np.uint32(8 * operand + 2 * stream) + half, group[None]))
    # Without the barrier XLA computes the rounds again for each element that reads a word.
    stacked = jnp.stack(barrier(*words), axis=1)
    return jnp.stack([stacked & 0xFFFF, stacked >> 16], axis=2).reshape(16, *outer.shape)

"""Stochastic rounding by position: the JAX form of octavo_numerics' `rounding_bits` and `round_stochastic`."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from octavo_jax.arithmetic import bits as fp32
from octavo_jax.arithmetic.barrier import barrier
from octavo_jax.arithmetic.philox import philox
from octavo_jax.optimizers.places import place_of, run_placed

MASTER, FIRST_MOMENT, SECOND_MOMENT = range(3)
"""Streams: which of a parameter's arrays the bits are for."""

_PER_COUNTER = 8
_NAN = np.uint32(0x7FC0)


class Draws(NamedTuple):
    """What the random bits of one parameter in one step depend on, apart from the position.

    key     uint32 [2], the seed's words
    step    uint32 scalar, the first step being 1
    tensor  the parameter's number among the tree's leaves
    """

    key: Array
    step: Array
    tensor: int


def rounding_bits(like: Array, draws: Draws, streams: tuple[int, ...]) -> list[Array]:
    """For each stream the 16 random bits of each element of an array like this one, in its place, uint32.

    All streams are one computation: XLA takes a second to compile ten rounds.
    """
    place = place_of(like)
    out = None if place is None else [place] * len(streams)

    def drawn(key: Array, step: Array) -> list[Array]:
        return _rounding_bits(like.shape, Draws(key, step, draws.tensor), streams)

    bits: list[Array] = run_placed(drawn, out, draws.key, draws.step)
    return bits


def _rounding_bits(shape: tuple[int, ...], draws: Draws, streams: tuple[int, ...]) -> list[Array]:
    *rows, columns = shape or (1,)
    row, block = _row_numbers(rows)[..., None], jnp.arange(-(-columns // _PER_COUNTER), dtype=jnp.uint32)
    last = jnp.asarray(np.array([(1 << 31) + 4 * draws.tensor + stream for stream in streams], np.uint32))
    last = last.reshape(-1, *(1,) * (row.ndim))
    # Without the barrier XLA computes the rounds again for each element that reads a word.
    words = jnp.stack(barrier(*philox(draws.key, (row, block, draws.step, last))), axis=-1)
    halves = jnp.stack([words & 0xFFFF, words >> 16], axis=-1)
    bits_of = halves.reshape(len(streams), *rows, len(block) * _PER_COUNTER)
    return [bits[..., :columns].reshape(shape) for bits in bits_of]


def _row_numbers(rows: list[int]) -> Array:
    """uint32: of each row of the last axis, in an array of the other axes, so that a mesh may cut any of them."""
    numbers = jnp.zeros(rows, jnp.uint32)
    for axis in range(len(rows)):
        numbers = numbers * np.uint32(rows[axis]) + lax.broadcasted_iota(jnp.uint32, rows, axis)
    return numbers


def round_stochastic(values: Array, random: Array) -> Array:
    """fp32 `values` as bf16: up in magnitude where the lower 16 bits and the 16 random bits carry.

    Infinities stay, and every NaN is 0x7FC0.
    """
    bits = fp32.as_bits(values)
    magnitude = bits & fp32.MAGNITUDE
    odd = jnp.where(magnitude > fp32.INFINITY, _NAN, bits >> 16)
    rounded = jnp.where(fp32.is_finite(magnitude), (bits + random) >> 16, odd)
    return lax.bitcast_convert_type(rounded.astype(jnp.uint16), jnp.bfloat16)

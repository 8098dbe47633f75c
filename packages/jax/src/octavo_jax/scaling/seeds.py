"""Seeds of stochastic rounding: a host integer or a device value, as two 32-bit words."""

from __future__ import annotations

import operator

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from octavo import QuantizerSpec
from octavo_jax.arrays.operands import check_seed, first_group


def seed_words(seed: int | Array | np.ndarray) -> Array:
    """uint32 [2], low word first, of a seed modulo 2^64.

    seed   a host integer of any size; an integer scalar array, traced or not (a negative one is taken modulo 2^64);
           uint32 [2] words, as this function returns them; or a key (`jax.random.key`), whose own two words are taken,
           and of a generator with more of them two words that it draws
    """
    if isinstance(seed, np.ndarray) and seed.ndim == 0 and np.issubdtype(seed.dtype, np.integer):
        seed = int(seed)  # jnp.asarray would keep 32 bits of 64
    if isinstance(seed, jax.Array | np.ndarray):
        seed = jnp.asarray(seed)
        if jnp.issubdtype(seed.dtype, jax.dtypes.prng_key):
            return _key_words(seed)
        if seed.dtype == jnp.uint32 and seed.shape == (2,):
            return seed
        if seed.ndim != 0 or not jnp.issubdtype(seed.dtype, jnp.integer):
            raise ValueError(
                f"seed has shape {list(seed.shape)} and dtype {seed.dtype}; give an integer scalar, uint32 [2] "
                "words, or one key of jax.random.key"
            )
        if seed.dtype.itemsize == 8:
            return jnp.stack([seed.astype(jnp.uint32), (seed >> 32).astype(jnp.uint32)])
        high = jnp.where(seed < 0, np.uint32(0xFFFFFFFF), np.uint32(0))
        return jnp.stack([seed.astype(jnp.int32).astype(jnp.uint32) if seed.dtype != jnp.uint32 else seed, high])
    try:
        value = operator.index(seed) % (1 << 64)
    except TypeError:
        raise ValueError(
            f"seed is {seed!r}; give an integer, an integer scalar array, or a key of jax.random.key"
        ) from None
    return jnp.asarray(np.array([value & 0xFFFFFFFF, value >> 32], np.uint32))


def _key_words(key: Array) -> Array:
    if key.ndim:
        raise ValueError(
            f"seed is {key.size} keys of shape {list(key.shape)}; give one of them, such as jax.random.split(key)[0]"
        )
    words = jax.random.key_data(key)
    return words if words.shape == (2,) else jax.random.bits(key, (2,), jnp.uint32)


def random_key(
    spec: QuantizerSpec, seed: int | Array | None, group_offset: int | Array
) -> tuple[Array, Array | np.ndarray] | None:
    """What stochastic rounding is keyed by: the seed's words, uint32 [2], and the number of the first group.

    None where the quantizer rounds to nearest; ValueError where it needs a seed and there is none.
    """
    check_seed(spec, seed)
    if not spec.stochastic or seed is None:
        return None
    return seed_words(seed), first_group(group_offset)


def second_stream(words: Array) -> Array:
    """Seed words [2] of the second layer of a function that takes one seed: those of seed XOR 2^63.

    Philox's key is the seed, so two layers with one key would draw the same bits at the same positions.
    """
    return words ^ jnp.asarray(np.array([0, 1 << 31], np.uint32))

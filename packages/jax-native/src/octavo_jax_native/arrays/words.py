"""int64 for the kernels, as pairs of 32-bit words, because JAX has no int64 unless it is turned on."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array


def as_int64(numbers: Array) -> Array:
    """int32 [2 M] of integers [M]: the words of each as int64, the lower one first."""
    low = numbers.astype(jnp.int32)
    return jnp.stack([low, low >> 31], axis=-1).reshape(-1)


def as_int32(words: Array) -> Array:
    """The integers, int32 [M], of words that `as_int64` or a kernel has made, where they fit."""
    return words[::2]

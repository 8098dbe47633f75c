"""Initializers of the modules' parameters."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import Array
from jax.typing import DTypeLike

Initializer = Callable[..., Any]

zeros_init: Initializer = jax.nn.initializers.zeros
ones_init: Initializer = jax.nn.initializers.ones
dense_kernel_init: Initializer = jax.nn.initializers.lecun_normal()
"""Of kernels [K, N]."""
grouped_kernel_init: Initializer = jax.nn.initializers.lecun_normal(in_axis=-2, out_axis=-1, batch_axis=(0,))
"""Of kernels [G, K, N]: the fan-in is K, whatever G is."""


def flattened(init: Initializer, inputs: int) -> Initializer:
    """`init` of a kernel [*in, *out] as it is of [K, N]: its first `inputs` axes are K together, and so its fan-in."""

    def wrapped(key: Array, shape: Sequence[int], dtype: DTypeLike) -> Any:
        kernel_tree = init(key, (math.prod(shape[:inputs]), math.prod(shape[inputs:])), dtype)
        return jax.tree.map(lambda kernel: kernel.reshape(tuple(shape)), kernel_tree)  # a box of Flax's is a tree, too

    return wrapped

"""MXFP4Weights: a layer is that of blocks of the rounded kernel, and gradients go straight through."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import octavo_jax
from octavo import BlockScaling
from octavo_numerics import round_mxfp4

G, K, N = 3, 160, 144
SIZES = np.array([5, 0, 9], np.int32)


def spread(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """Blocks of 32 along either axis that E4M3 holds, and some that it does not."""
    w = rng.standard_normal(shape).astype(np.float32)
    w[:, 3:7] *= np.float32(2.0**-18)
    w[..., 9:12] *= np.float32(2.0**-19)
    return w


@pytest.mark.parametrize("weight", ["kn", "nk"])
def test_a_layer_is_that_of_blocks_of_the_rounded_kernel(weight: str, rng: np.random.Generator) -> None:
    """y and both gradients, jitted, with the kernel as [G, K, N] and as [G, N, K]: blocks of 32 run along K."""
    shape, along = ((G, K, N), "columnwise") if weight == "kn" else ((G, N, K), "rowwise")
    kernel = spread(rng, *shape)
    x = jnp.asarray(rng.standard_normal((17, K)), jnp.bfloat16)
    dy = jnp.asarray(rng.standard_normal((17, N)), jnp.bfloat16)

    def step(recipe: Any) -> Any:
        def layer(x: jax.Array, kernel: jax.Array) -> jax.Array:
            return octavo_jax.grouped_dense(
                x, kernel, SIZES, recipe=recipe, contracting_dims=((-1,), (shape.index(K),)), backend="jax-native"
            )

        def both(x: jax.Array, kernel: jax.Array) -> Any:
            y, pull = jax.vjp(layer, x, kernel)
            return y, *pull(dy)

        return jax.jit(both)

    ours = step("mxfp4")(x, jnp.asarray(kernel))
    blocks = step(BlockScaling())(x, jnp.asarray(round_mxfp4(kernel, along)))  # type: ignore[arg-type]
    for one, other in zip(ours, blocks, strict=True):
        assert one.dtype == other.dtype
        assert np.asarray(one).tobytes() == np.asarray(other).tobytes()

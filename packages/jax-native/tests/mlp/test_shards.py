"""An MLP on a mesh has the kernels' bits in what is fused before its quantizers, too."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import octavo
import octavo_jax
from octavo_jax import MeshAxes

M, K, F, N, G = 40, 64, 96, 48, 3


@pytest.mark.parametrize("recipe", ["fp8-block", "mxfp8"])
def test_gradients_of_probabilities_are_one_devices(recipe: str, rng: np.random.Generator) -> None:
    """The pass that quantizes dy makes them on each shard; JAX's operations would sum in an order of their own."""
    blocks = min(4, jax.device_count())
    arrays: list[Any] = [
        jnp.asarray(rng.standard_normal(shape), jnp.bfloat16)
        for shape in ((blocks, M, K), (G, K, 2 * F), (G, F, N), (blocks, M, N))
    ]
    x, wi, wo, dy = arrays
    probs = jnp.asarray(rng.random((blocks, M)), jnp.float32)
    sizes = jnp.asarray([sorted(rng.multinomial(M - 3, [0.5, 0.0, 0.5])) for _ in range(blocks)], jnp.int32)

    def gradient(x: Any, probs: Any, sizes: Any, dy: Any, sharding: MeshAxes | None = None) -> Any:
        layer = partial(octavo_jax.grouped_mlp, recipe=octavo.recipe(recipe), sharding=sharding, backend="jax-native")
        return jax.vjp(lambda probs: layer(x, wi, wo, sizes, probs=probs), probs)[1](dy)[0]

    wanted = jax.vmap(jax.jit(gradient))(x, probs, sizes, dy)
    mesh = jax.make_mesh((blocks,), ("dp",), (AxisType.Auto,), devices=jax.devices()[:blocks])
    with jax.set_mesh(mesh):
        over = NamedSharding(mesh, P("dp"))
        given = [jax.device_put(array, over) for array in (x, probs, sizes, dy)]
        got = jax.jit(partial(gradient, sharding=MeshAxes(dp="dp")))(*given)
    np.testing.assert_array_equal(np.asarray(got), np.asarray(wanted))
    assert np.asarray(got)[:, : M - 3].any(axis=1).all()

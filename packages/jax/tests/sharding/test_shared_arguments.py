"""Functions without `sharding` inside `jax.shard_map`, whose arrays differ between shards or are shared by them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import octavo_jax
from octavo_jax import moe

T, C, E = 4, 32, 2


def _routing(weights: Any) -> moe.Routing:
    return moe.arrange(jnp.array([[1], [0], [E], [0]]), weights[:T, :1], E)


FUNCTIONS: dict[str, Callable[[Any, Any], Any]] = {
    "normalize": lambda x, shared: octavo_jax.normalize(x, shared[0], epsilon=1e-30),
    "normalize, layer": lambda x, shared: octavo_jax.normalize(x, shared[0], shared[1], norm="layer", epsilon=1e-30),
    "activate, probs": lambda x, shared: octavo_jax.activate(x, "relu2", probs=shared[:, 0]),
    "activate, x": lambda x, shared: octavo_jax.activate(shared, "relu2", probs=x[:, 0]),
    "permute": lambda x, shared: moe.permute(shared, moe.route(x[:, :E], 1)),
    "combine, weights": lambda x, shared: moe.combine(x, _routing(shared)),
    "combine, rows": lambda x, shared: moe.combine(shared, _routing(x)),
    "row_weights": lambda x, shared: moe.row_weights(_routing(shared))[:, None] * x,
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_gradients_of_what_shards_share(name: str, mesh_of: Any, rng: np.random.Generator) -> None:
    """They are summed over the shards, as of operations of JAX's own: a norm's scale in data-parallel training was
    refused by JAX, whose custom_vjps want one type. All numbers are small integers, and every sum exact."""
    function, mesh = FUNCTIONS[name], mesh_of(data=2)
    x = rng.permuted(np.tile(np.float32([-1, 1]), (2 * T, C // 2)), axis=1)  # of mean 0 and mean square 1
    shared, dy = (rng.integers(-3, 4, (T, C)).astype(np.float32) for _ in range(2))

    def loss(x: Any, shared: Any) -> Any:
        y = function(x, shared)
        return jnp.sum(y * dy[: y.shape[0], : y.shape[1]])

    over_shards = jax.shard_map(
        lambda x, shared: jax.lax.psum(loss(x, shared), "data"), mesh=mesh, in_specs=(P("data"), P()), out_specs=P()
    )
    made = jax.jit(jax.grad(over_shards, (0, 1)))(x, shared)
    wanted = jax.jit(jax.grad(lambda x, shared: loss(x[:T], shared) + loss(x[T:], shared), (0, 1)))(x, shared)
    for one, other in zip(made, wanted, strict=True):
        assert np.array_equal(one, other)

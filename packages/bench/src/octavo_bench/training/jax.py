"""Steps of `octavo_jax.grouped_dense` and of `jax.lax.ragged_dot`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

import octavo_jax
from octavo import DelayedScaling
from octavo_bench.harness.engine.protocol import Engine
from octavo_bench.harness.options import Names
from octavo_bench.harness.problem import Data
from octavo_bench.harness.recipes import FRAMEWORK, recipe_of
from octavo_bench.harness.timing import Call


def dense_calls(engine: Engine, data: Data, sizes: Sequence[int], kind: str, backend: Names) -> list[Call]:
    """Calls that return y and the gradients of x and the kernel [G, K, N], one per set of buffers.

    Without y among the results, XLA would leave its GEMM out.
    """
    rows = engine.array(list(sizes), "int64")
    step = jax.jit(_own if kind == FRAMEWORK else dense_step(kind, backend, data.shape.groups))
    turned = jax.jit(lambda w: jnp.swapaxes(w, 1, 2))
    return [partial(step, arrays["x"], turned(arrays["w"]), arrays["dy"], rows) for arrays in data.sets]


def _own(x: Any, kernel: Any, dy: Any, sizes: Any) -> Any:
    y, pull = jax.vjp(lambda x, kernel: jax.lax.ragged_dot(x, kernel, sizes), x, kernel)
    return y, *pull(dy)


def dense_step(kind: str, backend: Names, groups: int) -> Any:
    """A step (x, kernel, dy, sizes) -> (y, dx, dkernel) of a recipe; of a stateful one the next state as well."""
    recipe = recipe_of(kind)
    layer = partial(octavo_jax.grouped_dense, recipe=recipe, backend=backend)
    if not isinstance(recipe, DelayedScaling):
        seed = 1 if recipe.stochastic else None

        def stateless(x: Any, kernel: Any, dy: Any, sizes: Any) -> Any:
            y, pull = jax.vjp(lambda x, kernel: layer(x, kernel, sizes, seed=seed), x, kernel)
            return y, *pull(dy)

        return stateless
    fresh = octavo_jax.init_delayed(recipe, groups)

    def stateful(x: Any, kernel: Any, dy: Any, sizes: Any) -> Any:
        (y, state), pull = jax.vjp(lambda x, kernel, state: layer(x, kernel, sizes, state=state), x, kernel, fresh)
        *gradients, recorded = pull((dy, jax.tree.map(jnp.zeros_like, state)))
        return y, *gradients, octavo_jax.update_delayed(recorded, recipe)

    return stateful

"""One training step of octavo_jax.grouped_dense, and of jax.lax.ragged_dot."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

import octavo_jax
from octavo import DelayedScaling
from octavo_bench.harness.engine.protocol import Engine
from octavo_bench.harness.problem import Data, Names
from octavo_bench.harness.recipes import recipe_of
from octavo_bench.harness.timing import Call
from octavo_bench.step.row import PEER


def jax_steps(engine: Engine, data: Data, sizes: Sequence[int], kind: str, backend: Names) -> list[Call]:
    """Calls that return y and the gradients of x and the kernel [G, K, N], one a set of buffers.

    Without y among the results, XLA would leave its GEMM out.
    """
    held = engine.array(list(sizes), "int64")
    step = jax.jit(_own if kind == PEER else ours(kind, backend, data.shape.groups))
    turned = jax.jit(lambda w: jnp.swapaxes(w, 1, 2))
    return [_call(step, arrays["x"], turned(arrays["w"]), arrays["dy"], held) for arrays in data.sets]


def _call(step: Any, x: Any, kernel: Any, dy: Any, sizes: Any) -> Call:
    return lambda: step(x, kernel, dy, sizes)


def _own(x: Any, kernel: Any, dy: Any, sizes: Any) -> Any:
    y, pull = jax.vjp(lambda x, kernel: jax.lax.ragged_dot(x, kernel, sizes), x, kernel)
    return y, *pull(dy)


def ours(kind: str, backend: Names, groups: int) -> Any:
    """A step (x, kernel, dy, sizes) -> (y, dx, dkernel) of a recipe; of a stateful one the next state as well."""
    recipe = recipe_of(kind)
    more: dict[str, Any] = {"seed": 1} if recipe.stochastic else {}
    if not isinstance(recipe, DelayedScaling):

        def stateless(x: Any, kernel: Any, dy: Any, sizes: Any) -> Any:
            def layer(x: Any, kernel: Any) -> Any:
                return octavo_jax.grouped_dense(x, kernel, sizes, recipe=recipe, backend=backend, **more)

            y, pull = jax.vjp(layer, x, kernel)
            return y, *pull(dy)

        return stateless
    fresh = octavo_jax.init_delayed(recipe, groups)

    def stateful(x: Any, kernel: Any, dy: Any, sizes: Any) -> Any:
        def layer(x: Any, kernel: Any, state: Any) -> Any:
            return octavo_jax.grouped_dense(x, kernel, sizes, recipe=recipe, state=state, backend=backend)

        (y, state), pull = jax.vjp(layer, x, kernel, fresh)
        *gradients, recorded = pull((dy, jax.tree.map(jnp.zeros_like, state)))
        return y, *gradients, octavo_jax.update_delayed(recorded, recipe)

    return stateful

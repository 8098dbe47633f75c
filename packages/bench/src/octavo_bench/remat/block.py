"""The block that `octavo bench remat` times: layers of experts in a row, each under a policy of `jax.checkpoint`.

a = swiglu(x @ wi[g]);  x = x + a @ wo[g]        x [M, K], wi [L, G, K, 2F], wo [L, G, F, K]
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

import octavo_jax
from octavo import DelayedScaling
from octavo_bench.harness.options import Names
from octavo_bench.harness.recipes import recipe_of
from octavo_bench.harness.shapes import Shape
from octavo_bench.remat.benchmark import KEPT, NOTHING, OUTPUTS, PEER, PLAIN, ROWS
from octavo_jax.policies import plane_names, save_quantized


class Operands(NamedTuple):
    """What a step takes; state: None but in delayed scaling, then a pair of `DelayedState`, each with a layer axis."""

    x: Array
    wi: Array
    wo: Array
    dy: Array
    sizes: Array
    state: Any = None


def operands(kind: str, shape: Shape, layers: int, sizes: tuple[int, ...], seed: int) -> Operands:
    """bf16 normal values, of weights divided by the square root of what they sum over."""

    def draw(key: Array) -> tuple[Array, ...]:
        keys = jax.random.split(key, 4)
        k, f = shape.k, shape.n
        sides = ((shape.rows, k), (layers, shape.groups, k, 2 * f), (layers, shape.groups, f, k), (shape.rows, k))
        drawn = [jax.random.normal(one, side, jnp.bfloat16) for one, side in zip(keys, sides, strict=True)]
        return drawn[0], drawn[1] * k**-0.5, drawn[2] * f**-0.5, drawn[3]

    recipe = recipe_of(kind)
    state = None
    if isinstance(recipe, DelayedScaling):
        fresh = octavo_jax.init_delayed(recipe, shape.groups)
        state = jax.tree.map(lambda leaf: jnp.stack([leaf] * layers), (fresh, fresh))
    x, wi, wo, dy = jax.jit(draw)(jax.random.key(seed))
    return Operands(x, wi, wo, dy, jnp.asarray(sizes, jnp.int32), state)


def step(kind: str, policy: str, backend: Names, *, unroll: bool) -> Callable[[Operands], Any]:
    """A function of `Operands` that returns the gradients of x, wi and wo, and the state after the step.

    kind     the name of a recipe, or `PEER`
    policy   one of `POLICIES`
    """
    experts: Callable[..., Array] = _ragged_dot if kind == PEER else _grouped_mlp(kind, backend)
    under = _under(policy, lambda x, parts, sizes: x + experts(x, *parts, sizes))

    def block(x: Array, wi: Array, wo: Array, state: Any, sizes: Array) -> Array:
        if unroll:
            for index in range(wi.shape[0]):
                x = under(x, jax.tree.map(lambda leaf: leaf[index], (wi, wo, state)), sizes)  # noqa: B023
            return x
        return jax.lax.scan(lambda x, parts: (under(x, parts, sizes), None), x, (wi, wo, state))[0]

    def gradients(given: Operands) -> Any:
        x, wi, wo, dy, sizes, state = given
        return jax.vjp(lambda x, wi, wo, state: block(x, wi, wo, state, sizes), x, wi, wo, state)[1](dy)

    return gradients


def _under(policy: str, layer: Callable[..., Array]) -> Callable[..., Array]:
    if policy == NOTHING:
        return layer
    saved = {
        PLAIN: None,
        KEPT: save_quantized(),
        OUTPUTS: save_quantized("quantization", "y"),
        ROWS: save_quantized(*plane_names(("x",)), "y"),
    }[policy]
    return jax.checkpoint(layer, policy=saved)


def _ragged_dot(x: Array, wi: Array, wo: Array, state: None, sizes: Array) -> Array:
    gate, up = jnp.split(jax.lax.ragged_dot(x, wi, sizes), 2, axis=-1)
    return jax.lax.ragged_dot(jax.nn.silu(gate) * up, wo, sizes)


def _grouped_mlp(kind: str, backend: Names) -> Callable[..., Array]:
    recipe = recipe_of(kind)
    seed = 1 if recipe.stochastic else None

    def experts(x: Array, wi: Array, wo: Array, state: Any, sizes: Array) -> Array:
        result = octavo_jax.grouped_mlp(
            x, wi, wo, sizes, recipe=recipe, seed=seed, state=state, output_checkpoint_names=("y", "y"), backend=backend
        )
        y: Array = result if state is None else result[0]
        return y

    return experts

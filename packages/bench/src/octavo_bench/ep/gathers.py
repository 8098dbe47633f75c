"""The gathers of kernels that FSDP cuts: two layers in a scan, forward and the gradient of x, compiled with its arrays.

In a scan, as FSDP is used, the backward pass gathers again, and XLA cannot merge the two. The kernels' gradient has
nothing to gather: it is left out, so that all that moves is gathers.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from octavo import Recipe
from octavo_bench.ep.block import AXIS, SHARED, Spec, mesh_of
from octavo_bench.harness.options import Names
from octavo_bench.harness.shapes import Shape
from octavo_jax import MeshAxes, grouped_dense
from octavo_jax.policies import save_quantized
from octavo_jax.traffic import collectives

LAYERS = 2


def gathering_step(
    platform: str, devices: int, shape: Shape, recipe: Recipe, backend: Names, seed: int
) -> tuple[Any, dict[str, jax.Array]]:
    """A compiled step of layers with kernels [G, K, 2F] cut along K, rows spread evenly, and its arguments."""
    mesh, rows = mesh_of(platform, devices), shape.rows // devices
    cut, kernels_cut = NamedSharding(mesh, SHARED), NamedSharding(mesh, Spec(None, None, AXIS))
    shapes = {
        "x": (devices, rows, shape.k),
        "kernels": (LAYERS, shape.groups, shape.k, 2 * shape.n),
        "dy": (devices, rows, 2 * shape.n),
    }
    lie = {name: kernels_cut if name == "kernels" else cut for name in shapes}

    @partial(jax.jit, out_shardings=lie)
    def draw(key: Any) -> dict[str, jax.Array]:
        keys = jax.random.split(key, len(shapes))
        named = zip(keys, shapes.items(), strict=True)
        return {name: jax.random.normal(one, sides, jnp.bfloat16) for one, (name, sides) in named}

    sizes = np.full((devices, shape.groups), rows // shape.groups, np.int32)
    arrays = {**draw(jax.random.key(seed)), "sizes": jax.device_put(sizes, cut)}

    def step(arrays: dict[str, jax.Array]) -> Any:
        def layer(x: jax.Array, kernel: jax.Array) -> tuple[jax.Array, jax.Array]:
            y = grouped_dense(
                x,
                kernel,
                arrays["sizes"],
                recipe=recipe,
                seed=0 if recipe.stochastic else None,
                sharding=MeshAxes(fsdp=AXIS),
                backend=backend,
            )
            return x, jnp.sum(y * arrays["dy"])

        saving = jax.checkpoint(layer, policy=save_quantized())
        return jax.value_and_grad(lambda x: jnp.sum(jax.lax.scan(saving, x, arrays["kernels"])[1]))(arrays["x"])

    with jax.set_mesh(mesh):
        return jax.jit(step).lower(arrays).compile(), arrays


def gathered_bytes(program: Any) -> int:
    """Bytes that one device holds after the gathers of one layer, forward and backward; a loop lists its own once."""
    return sum(one.bytes for one in collectives(program) if one.kind == "all-gather")

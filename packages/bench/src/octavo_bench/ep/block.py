"""What `octavo bench ep --framework jax` compiles: a step of a MoE block, on one device or spread over several."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from octavo import Recipe
from octavo_bench.harness.options import Names
from octavo_bench.harness.shapes import Shape
from octavo_jax import MeshAxes
from octavo_jax.moe import Exchange, moe_mlp
from octavo_jax.traffic import collectives

AXIS = "devices"
Spec: Any = PartitionSpec  # JAX leaves it untyped
SHARED, WHOLE = Spec(AXIS), Spec()


def mesh_of(platform: str, devices: int) -> Mesh:
    """One axis of that many devices."""
    return jax.make_mesh((devices,), (AXIS,), (AxisType.Auto,), devices=jax.devices(platform)[:devices])


@dataclass(frozen=True)
class Block:
    """Arrays of a block on a mesh: x and dy [T, K], router [K, G], wi [G, K, 2F], wo [G, F, K]; all bf16."""

    mesh: Mesh
    arrays: dict[str, jax.Array]


def draw_block(platform: str, devices: int, shape: Shape, k: int, seed: int) -> Block:
    """Random tokens and experts, cut along their first axes; the router spreads them about evenly."""
    mesh, tokens = mesh_of(platform, devices), shape.rows // k
    shapes = {
        "x": (tokens, shape.k),
        "router": (shape.k, shape.groups),
        "wi": (shape.groups, shape.k, 2 * shape.n),
        "wo": (shape.groups, shape.n, shape.k),
        "dy": (tokens, shape.k),
    }
    cut = {name: NamedSharding(mesh, WHOLE if name == "router" else SHARED) for name in shapes}

    @partial(jax.jit, out_shardings=cut)
    def draw(key: Any) -> dict[str, jax.Array]:
        keys = jax.random.split(key, len(shapes))
        fan_in = {name: 1.0 if name in ("x", "dy") else sides[-2] ** -0.5 for name, sides in shapes.items()}
        return {
            name: (jax.random.normal(one, sides, jnp.bfloat16) * fan_in[name]).astype(jnp.bfloat16)
            for one, (name, sides) in zip(keys, shapes.items(), strict=True)
        }

    return Block(mesh, draw(jax.random.key(seed)))


def compiled_step(block: Block, k: int, recipe: Recipe, exchange: Exchange, backend: Names) -> Any:
    """(y, all gradients, choices dropped or None) of the block's arrays, compiled."""
    roles = None if block.mesh.size == 1 else MeshAxes(ep=AXIS)

    def step(arrays: dict[str, jax.Array]) -> Any:
        def run(operands: dict[str, Any]) -> Any:
            y, stats, *_ = moe_mlp(
                **operands,
                k=k,
                recipe=recipe,
                seed=0 if recipe.stochastic else None,
                sharding=roles,
                exchange=exchange,
                backend=backend,
            )
            return y, stats.dropped

        y, pull, dropped = jax.vjp(run, {name: one for name, one in arrays.items() if name != "dy"}, has_aux=True)
        return y, pull(arrays["dy"])[0], dropped

    with jax.set_mesh(block.mesh):
        return jax.jit(step).lower(block.arrays).compile()


def received_bytes(program: Any, devices: int) -> int:
    """What one device receives from the others in all collectives that move rows, what is in loops counted once."""
    kinds = ("all-gather", "all-to-all", "ragged-all-to-all")
    total = sum(one.bytes for one in collectives(program) if one.kind in kinds)
    return total * (devices - 1) // devices

"""What `octavo bench ep` compiles: a step of a MoE block, on one device or spread, and of a layer that FSDP shards."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from octavo import Recipe
from octavo_cli.bench.gemm_problem import Names
from octavo_cli.bench.shapes import Shape
from octavo_jax import MeshAxes, grouped_dense
from octavo_jax.moe import Exchange, moe_mlp
from octavo_jax.policies import save_quantized
from octavo_jax.traffic import collectives

AXIS = "devices"
# JAX leaves them untyped.
_Spec: Any = PartitionSpec
_Shape: Any = jax.ShapeDtypeStruct
SHARED, WHOLE = _Spec(AXIS), _Spec()


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
        def run(given: dict[str, Any]) -> Any:
            y, stats, *_ = moe_mlp(
                **given,
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
    """What one device receives from the others in all collectives that move rows, those in loops counted once."""
    kinds = ("all-gather", "all-to-all", "ragged-all-to-all")
    total = sum(one.bytes for one in collectives(program) if one.kind in kinds)
    return total * (devices - 1) // devices


def gathered_bytes(platform: str, devices: int, shape: Shape, recipe: Recipe, backend: Names) -> int:
    """Bytes of the all-gathers in forward and backward of one layer whose kernel [G, K, 2F] is cut along K by FSDP.

    It is one of two in a scan, as FSDP is used: the backward pass gathers again, and XLA cannot merge the two.
    """
    mesh, rows, layers = mesh_of(platform, devices), shape.rows // devices, 2
    cut, kernels_cut = NamedSharding(mesh, SHARED), NamedSharding(mesh, _Spec(None, None, AXIS))
    given = {
        "x": _Shape((devices, rows, shape.k), jnp.bfloat16, sharding=cut),
        "kernels": _Shape((layers, shape.groups, shape.k, 2 * shape.n), jnp.bfloat16, sharding=kernels_cut),
        "sizes": _Shape((devices, shape.groups), np.int32, sharding=cut),
        "dy": _Shape((devices, rows, 2 * shape.n), jnp.bfloat16, sharding=cut),
    }

    def step(given: dict[str, jax.Array]) -> Any:
        def layer(x: jax.Array, kernel: jax.Array) -> tuple[jax.Array, jax.Array]:
            y = grouped_dense(
                x,
                kernel,
                given["sizes"],
                recipe=recipe,
                seed=0 if recipe.stochastic else None,
                sharding=MeshAxes(fsdp=AXIS),
                backend=backend,
            )
            return x, jnp.sum(y * given["dy"])

        kept = jax.checkpoint(layer, policy=save_quantized())

        def total(x: jax.Array, kernels: jax.Array) -> jax.Array:
            return jnp.sum(jax.lax.scan(kept, x, kernels)[1])

        return jax.value_and_grad(total, argnums=(0, 1))(given["x"], given["kernels"])

    with jax.set_mesh(mesh):
        program = jax.jit(step).lower(given).compile()
    return sum(one.bytes for one in collectives(program) if one.kind == "all-gather")

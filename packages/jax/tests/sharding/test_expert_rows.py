"""Rows [M, K] and sizes [G], both cut by ep: blocks of experts one after the other, without an axis for them."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import octavo
import octavo_jax
from octavo_jax import MeshAxes
from octavo_jax.traffic import collectives

AXES = MeshAxes(ep="ep", fsdp="fsdp")
M, K, N, G, E = 24, 64, 32, 4, 2
BACKEND = "jax-reference"


@pytest.mark.parametrize(
    ("kind", "recipe"),
    [
        (AxisType.Auto, "mxfp8"),
        (AxisType.Explicit, "bf16"),
        pytest.param(AxisType.Explicit, "mxfp8", marks=pytest.mark.slow),
    ],
    ids=["auto", "explicit", "explicit-mxfp8"],
)
def test_rows_are_blocks_of_experts(
    kind: AxisType, recipe: str, mesh_of: Any, placed: Any, rng: np.random.Generator
) -> None:
    """y and dx are the bits of each device's rows alone, tails too, dw has the kernel's place; no token moves."""
    x, dy = (rng.standard_normal((M, width)).astype(np.float32) for width in (K, N))
    kernel = rng.standard_normal((G, K, N)).astype(np.float32)
    sizes = np.array([5, 0, 3, 9], np.int32)
    x[5:12] = dy[5:12] = np.nan
    layer = partial(octavo_jax.grouped_dense, recipe=octavo.recipe(recipe), backend=BACKEND)

    def step(layer: Any, x: Any, kernel: Any, sizes: Any, dy: Any) -> Any:
        y, pull = jax.vjp(lambda x, kernel: layer(x, kernel, sizes), x, kernel)
        return y, *pull(dy)

    alone = jax.jit(partial(step, layer))
    halves = [alone(*(np.split(one, E)[e] for one in (x, kernel, sizes, dy))) for e in range(E)]
    wanted = [np.concatenate(parts) for parts in zip(*halves, strict=True)]
    mesh = mesh_of(kind, ep=2, fsdp=2)
    if mesh.shape["ep"] != E:
        pytest.skip("fewer than two shards of experts")
    with jax.set_mesh(mesh):
        given = placed(mesh, [x, kernel, sizes, dy], [P("ep"), P("ep", "fsdp"), P("ep"), P("ep")])
        compiled = jax.jit(partial(step, partial(layer, sharding=AXES))).lower(*given).compile()
        made = compiled(*given)
    for one, other in zip(made, wanted, strict=True):
        np.testing.assert_array_equal(one, other)
    assert [one.sharding.spec[0] for one in made] == ["ep"] * 3
    assert made[2].sharding.spec[1] == "fsdp"
    assert not any({M, M // E} & set(result.shape) for one in collectives(compiled) for result in one.results)


def test_an_mlp_of_rows(mesh_of: Any, rng: np.random.Generator) -> None:
    """With a probability and a scale of the second bias for each row, as blocks with the axis E give it, and so are
    gradients; host sizes are checked block by block."""
    x, probs, scales = (rng.standard_normal(shape).astype(np.float32) for shape in ((M, K), (M,), (M,)))
    wi, wo, bo = (rng.standard_normal(shape).astype(np.float32) for shape in ((G, K, 2 * N), (G, N, K), (G, K)))
    mlp = partial(octavo_jax.grouped_mlp, recipe=None, sharding=MeshAxes(ep="ep"), backend=BACKEND)
    sizes, blocks = [5, 0, 3, 9], (E, M // E)
    mesh = mesh_of(ep=2)
    with jax.set_mesh(mesh):
        if mesh.shape["ep"] == E:

            def results(x: Any, sizes: Any, *of_rows: Any) -> list[Any]:
                y, pull = jax.vjp(
                    lambda probs, scales, bo: mlp(x, wi, wo, sizes, probs=probs, bo=bo, bo_scales=scales), *of_rows, bo
                )
                return [y, *pull(jnp.ones_like(y))]

            made = results(x, sizes, probs, scales)
            by_blocks = results(
                x.reshape(*blocks, K), np.reshape(sizes, (E, -1)), probs.reshape(blocks), scales.reshape(blocks)
            )
            for one, other in zip(made, by_blocks, strict=True):
                np.testing.assert_array_equal(one, np.reshape(other, one.shape))
        with pytest.raises(ValueError, match="sum to 14 and the tensor has 12 rows"):
            mlp(x, wi, wo, [5, 9, 3, 9])


def test_rows_that_do_not_divide_and_a_mesh_that_is_not_known(mesh_of: Any) -> None:
    """Both say what to give instead."""
    layer = partial(octavo_jax.grouped_dense, recipe=None, sharding=AXES, backend=BACKEND)
    kernel = jnp.zeros((G, K, N))
    with jax.set_mesh(mesh_of(ep=2)), pytest.raises(ValueError, match="the mesh has 'ep'"):
        layer(jnp.zeros((M, K)), kernel, jnp.zeros(G, jnp.int32))
    with pytest.raises(ValueError, match=r"no mesh is in scope that says how many.*x \[E, M, K\]"):
        layer(jnp.zeros((M, K)), kernel, jnp.zeros(G, jnp.int32))
    if (mesh := mesh_of(ep=2, fsdp=2)).shape["ep"] < 2:
        pytest.skip("fewer than four devices")
    with (
        jax.set_mesh(mesh),
        pytest.raises(
            ValueError, match=r"x has shape \[23, 64\] for 4 group sizes; give numbers of rows and of groups"
        ),
    ):
        layer(jnp.zeros((23, K)), kernel, jnp.zeros(G, jnp.int32))

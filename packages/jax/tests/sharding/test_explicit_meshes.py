"""Layers over Explicit meshes give the bits that they give over Auto ones, whatever the mesh cuts."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from moe_cases import BACKEND, CHOICES, E, block_arrays

import octavo
import octavo_jax
from octavo_jax import MeshAxes, moe

SLOW = pytest.mark.slow
HEADS, WIDTH, K = 4, 8, 32
X, KERNEL = (4, 6, K), (K, HEADS, WIDTH)
TO_HEADS = {"x": P("dp"), "kernel": P(None, "tp"), "sharding": MeshAxes(dp="dp", tp="tp")}
FROM_HEADS = {"x": P("dp", None, "tp"), "kernel": P("tp"), "sharding": MeshAxes(dp="dp", tp="tp", tp_dim="K")}
DELAYED = octavo.DelayedScaling(history=2)


def _without_dp(where: dict[str, Any]) -> dict[str, Any]:
    specs = {name: P(*(None if one == "dp" else one for one in where[name])) for name in ("x", "kernel")}
    return {**specs, "sharding": MeshAxes(tp="tp", tp_dim=where["sharding"].tp_dim)}


def _bits(results: Any) -> list[bytes]:
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(results)]


@pytest.mark.parametrize("where", [TO_HEADS, FROM_HEADS], ids=["to heads", "from heads"])
@pytest.mark.parametrize(
    "axes",
    [{"tp": 4}, pytest.param({"dp": 2, "tp": 4}, marks=SLOW), pytest.param({"dp": 2, "tp": 1}, marks=SLOW)],
    ids=str,
)
@pytest.mark.parametrize("function", ["dense", "layernorm_dense"])
def test_layers_of_one_matrix(
    function: str, axes: dict[str, int], where: dict[str, Any], mesh_of: Any, placed: Any, rng: np.random.Generator
) -> None:
    """Features that tp cuts are axes of their own in x or y, with data blocks and without; y lies as it is cut."""
    to_heads = where is TO_HEADS
    if function == "layernorm_dense" and not to_heads:
        pytest.skip("the normalization is over what tp would cut")
    if "dp" not in axes:
        where = _without_dp(where)
    x, kernel = (rng.standard_normal(shape).astype(np.float32) for shape in (X, KERNEL))
    if not to_heads:
        x, kernel = x.reshape(*X[:2], HEADS, K // HEADS), kernel.reshape(HEADS, K // HEADS, -1)
    recipe = "fp8-row"  # whose scales a mesh cuts along with the rows; where it says no more, one that compiles sooner
    if "dp" not in axes and not (function == "dense" and to_heads):
        recipe = "fp8-current" if function == "dense" else "bf16"
    how: dict[str, Any] = {"recipe": recipe, "sharding": where["sharding"], "backend": "jax-reference"}
    if not to_heads:
        how["contracting_dims"] = ((-2, -1), (0, 1))

    def layer(x: Any, kernel: Any) -> Any:
        if function == "dense":
            return octavo_jax.dense(x, kernel, **how)
        return octavo_jax.layernorm_dense(x, kernel, jnp.ones(K), return_normalized=True, **how)

    def step(x: Any, kernel: Any) -> Any:
        y, pull = jax.vjp(layer, x, kernel)
        return y, pull(y)

    made = {}
    for kind in (AxisType.Auto, AxisType.Explicit):
        mesh = mesh_of(kind, **axes)
        with jax.set_mesh(mesh):
            made[kind] = jax.jit(step)(*placed(mesh, [x, kernel], [where["x"], where["kernel"]]))
    assert _bits(made[AxisType.Auto]) == _bits(made[AxisType.Explicit])
    y = jax.tree.leaves(made[AxisType.Explicit])[0]
    lead = "dp" if "dp" in axes else None
    assert jax.typeof(y).sharding.spec == (P(lead, None, "tp", None) if to_heads else P(lead, None, None))


@pytest.mark.parametrize(
    "axes",
    [
        {"dp": 2, "ep": 4},
        pytest.param({"ep": 8}, marks=SLOW),
        pytest.param({"dp": 8}, marks=SLOW),
        pytest.param({"fsdp": 2, "ep": 2}, marks=SLOW),
        pytest.param({"dp": 2, "fsdp": 2, "ep": 2}, marks=SLOW),
    ],
    ids=str,
)
def test_delayed_states_of_a_block(axes: dict[str, int], mesh_of: Any, rng: np.random.Generator) -> None:
    """Data axes share a block's states and expert axes cut them: y, the state that the forward pass recorded, and the
    one after the backward pass, with a later call's amaxes in it."""
    a = block_arrays(rng)
    given = {name: one for name, one in a.items() if name != "dy"}
    roles = MeshAxes(**{role: role if role in axes else None for role in ("dp", "fsdp", "ep")})
    fresh = (octavo_jax.init_delayed(DELAYED, E),) * 2
    state = jax.tree.map(lambda leaf: jnp.asarray(rng.uniform(0.5, 2, leaf.shape), jnp.float32), fresh)

    def step(state: Any) -> Any:
        def block(state: Any) -> Any:
            y, _, later = moe.moe_mlp(**given, k=CHOICES, recipe=DELAYED, backend=BACKEND, state=state, sharding=roles)
            return jnp.sum(y * a["dy"]), later

        (loss, later), pull = jax.vjp(block, state)
        return loss, later, pull((jnp.ones_like(loss), jax.tree.map(partial(jnp.multiply, 2), later)))

    made = {}
    for kind in (AxisType.Auto, AxisType.Explicit):
        with jax.set_mesh(mesh_of(kind, **axes)):
            made[kind] = jax.jit(step)(state)
    assert _bits(made[AxisType.Auto]) == _bits(made[AxisType.Explicit])
    (_, _, (after,)) = made[AxisType.Explicit]
    assert [leaf.shape for leaf in jax.tree.leaves(after)] == [leaf.shape for leaf in jax.tree.leaves(state)]

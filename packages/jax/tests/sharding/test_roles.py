"""`mesh_roles`: the roles of a whole model, which every layer takes that is given none."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import octavo
import octavo_jax
from octavo_jax import MeshAxes, current_roles, linen, mesh_roles, moe
from octavo_jax import nnx as octavo_nnx
from octavo_jax.traffic import collectives

ROLES = MeshAxes(ep="ep", fsdp="fsdp")
HOW: dict[str, Any] = {"recipe": None, "backend": "jax-reference"}
T, K, F, G = 16, 8, 16, 4
X, SIZES = jnp.ones((T, K)), jnp.full(G, T // G, jnp.int32)
WI, WO, GAMMA = jnp.ones((G, K, 2 * F)), jnp.ones((G, F, K)), jnp.ones(K)


def _linen(**how: Any) -> Any:
    module = linen.GroupedMLP(num_groups=G, hidden=F, **HOW, **how)
    return module.apply({"params": {"wi": WI, "wo": WO}}, X, SIZES)


def _nnx(**how: Any) -> Any:
    return octavo_nnx.GroupedLinear(G, K, F, **HOW, **how, rngs=nnx.Rngs(0))(X, SIZES)


OF_GROUPS: dict[str, Callable[..., Any]] = {
    "grouped_dense": lambda **how: octavo_jax.grouped_dense(X, WI, SIZES, **HOW, **how),
    "grouped_mlp": lambda **how: octavo_jax.grouped_mlp(X, WI, WO, SIZES, **HOW, **how),
    "moe_mlp": lambda **how: moe.moe_mlp(X, jnp.ones((K, G)), WI, WO, k=2, **HOW, **how)[0],
    "linen": _linen,
    "nnx": _nnx,
}
OF_ONE_MATRIX: dict[str, Callable[..., Any]] = {
    "dense": lambda **how: octavo_jax.dense(X, WI[0], **HOW, **how),
    "layernorm_dense": lambda **how: octavo_jax.layernorm_dense(X, WI[0], GAMMA, **HOW, **how),
    "layernorm_mlp": lambda **how: octavo_jax.layernorm_mlp(X, GAMMA, WI[0], WO[0], **HOW, **how),
}


@pytest.fixture
def mesh(mesh_of: Any) -> Any:
    if jax.device_count() < 4:
        pytest.skip("fewer than four devices")
    return mesh_of(ep=2, fsdp=2)


def _traced(layer: Callable[..., Any], **how: Any) -> str:
    return str(jax.make_jaxpr(lambda: layer(**how))())


@pytest.mark.parametrize("name", OF_GROUPS)
def test_layers_take_them(name: str, mesh: Any) -> None:
    """Functions and modules alike: the program is the one that `sharding=` gives, and `sharding=` has the last word."""
    layer = OF_GROUPS[name]
    with jax.set_mesh(mesh):
        with mesh_roles(ROLES):
            ambient, none = _traced(layer), _traced(layer, sharding=MeshAxes(moves="allow"))
        given, alone = _traced(layer, sharding=ROLES), _traced(layer, sharding=MeshAxes(moves="allow"))
    assert ambient == given
    assert none == alone
    assert "shard_map" in given
    assert "shard_map" not in alone


@pytest.mark.parametrize("name", OF_ONE_MATRIX)
def test_layers_of_one_matrix_have_no_experts(name: str, mesh: Any) -> None:
    """The tokens of a model with experts are spread over ep, too, inside of dp and fsdp: four blocks of them."""
    with jax.set_mesh(mesh), mesh_roles(ROLES):
        text = _traced(OF_ONE_MATRIX[name])
    assert "P(('fsdp', 'ep'), None, None)" in text.replace('"', "'"), text[:2000]


def test_tokens_of_a_dense_layer_stay(mesh: Any, placed: Any, rng: np.random.Generator) -> None:
    """Where the MoE block has them, and the kernel's gradient is a sum over all of them."""
    rows = 40  # no other dimension is a multiple of ten, so that a collective on tokens shows
    x, kernel = rng.standard_normal((rows, 32)).astype(np.float32), rng.standard_normal((32, 32)).astype(np.float32)

    def step(x: Any, kernel: Any) -> Any:
        y, pull = jax.vjp(partial(octavo_jax.dense, **HOW), x, kernel)
        return y, *pull(2 * y)

    wanted = jax.jit(step)(x, kernel)
    with jax.set_mesh(mesh), mesh_roles(MeshAxes(ep="ep", fsdp="fsdp", moves="error")):
        given = placed(mesh, [x, kernel], [P(("fsdp", "ep")), P("fsdp")])
        compiled = jax.jit(step).lower(*given).compile()
        made = compiled(*given)
    np.testing.assert_array_equal(made[0], wanted[0])
    # sums of float32 products in another order, of four shards
    bound = (rows + 4) * 2.0**-23 * (np.abs(x).T @ np.abs(2 * np.asarray(wanted[0])))
    assert (np.abs(np.asarray(made[2]) - np.asarray(wanted[2])) <= bound).all()
    shapes = [result.shape for one in collectives(compiled) for result in one.results]
    assert not [shape for shape in shapes if any(side % 10 == 0 for side in shape)]


def test_a_jitted_function_is_traced_again_under_other_roles(mesh: Any) -> None:
    """And not under the same: what JAX keeps of a function is kept by roles."""
    routes: list[str] = []

    @jax.jit
    def layer(x: Any) -> Any:
        report = octavo_jax.explain(x.reshape(2, 2, 4, K), WI, jnp.ones((2, 2, 2), jnp.int32), **HOW)
        routes.append(f"{report.route} {report.lie.get('x')} {current_roles() is not None}")
        return x + 1

    by_data = MeshAxes(ep="ep", dp="fsdp")
    with jax.set_mesh(mesh):
        for roles in (None, ROLES, ROLES, by_data, MeshAxes(ep="ep", fsdp="fsdp"), None):
            if roles is None:
                layer(X)
                continue
            with mesh_roles(roles):
                layer(X)
    spec = P("ep", "fsdp", None, None)  # by data alone, too, and traced for it nevertheless
    assert routes == ["single None False", f"auto {spec} True", f"auto {spec} True"]


def test_they_are_of_one_thread_and_end() -> None:
    """Nested ones win, and nothing is left behind."""
    seen: list[Any] = []
    with mesh_roles(ROLES), mesh_roles(inner := MeshAxes(dp="a")):
        thread = threading.Thread(target=lambda: seen.append(current_roles()))
        thread.start()
        thread.join()
        assert current_roles() is inner
    assert seen == [None]
    assert current_roles() is None
    with pytest.raises(ValueError, match=r"axes is 'ep'; give octavo_jax.MeshAxes"):
        mesh_roles("ep")  # type: ignore[arg-type]


def test_without_a_mesh() -> None:
    """A model's roles need one as `sharding=` does."""
    kernel, sizes = jnp.ones((2, K, F)), jnp.ones((2, 1), jnp.int32)
    with mesh_roles(ROLES), pytest.raises(ValueError, match="there is no mesh"):
        octavo_jax.grouped_dense(jnp.ones((2, 4, K)), kernel, sizes, recipe=octavo.HighPrecision())

"""Functions without `sharding`, called on arrays that an Explicit mesh cuts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import octavo
import octavo_jax
from octavo_jax import moe

M, K, E = 16, 64, 4
SPEC: Any = octavo.MXFP8().quantizer("x")
KERNELS = jnp.ones((E, K, 32)), jnp.ones((E, 16, K))


def _routing() -> moe.Routing:
    return moe.arrange(jnp.zeros((M, 1), jnp.int32), jnp.ones((M, 1)), E)


FUNCTIONS: dict[str, Callable[[Any], Any]] = {
    "quantize": lambda x: octavo_jax.quantize(x, SPEC, jnp.array([9, 4])),
    "act_quantize": lambda x: octavo_jax.act_quantize(x, SPEC, activation="silu"),
    "dact_quantize": lambda x: octavo_jax.dact_quantize(x, x, SPEC, activation="silu"),
    "norm_quantize": lambda x: octavo_jax.norm_quantize(x, jnp.ones(K), SPEC),
    "tensor_stats": lambda x: octavo_jax.tensor_stats(x, SPEC),
    "choose_experts": lambda x: octavo_jax.choose_experts(x, k=2),
    "route": lambda x: moe.route(x, 2),
    "arrange": lambda x: moe.arrange(x.astype(jnp.int32), x, E),
    "permute": lambda x: moe.permute(x, _routing()),
    "combine": lambda x: moe.combine(x, _routing()),
    "moe_mlp": lambda x: octavo_jax.moe_mlp(x, jnp.ones((K, E)), *KERNELS, k=2, recipe=None),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_rows_that_are_cut_are_refused(name: str, mesh_of: Any, placed: Any, rng: np.random.Generator) -> None:
    """With the function, the argument and what to do: JAX spoke of `.at[...].get(out_sharding=)`, of a reshape or of
    `jnp.repeat` inside, and a custom call would have gathered the rows in silence."""
    mesh = mesh_of(AxisType.Explicit, data=2)
    (x,) = placed(mesh, [rng.standard_normal((M, K)).astype(np.float32)], [P("data")])
    what = "give moe_mlp sharding=" if name == "moe_mlp" else rf"{name} takes what one device holds; call it inside"
    with jax.set_mesh(mesh), pytest.raises(ValueError, match=rf"\[16, 64\] is placed as P\('data'.*, None\).*{what}"):
        jax.eval_shape(FUNCTIONS[name], x)


def test_what_the_sentence_says_works(mesh_of: Any, placed: Any, rng: np.random.Generator) -> None:
    """Inside of jax.shard_map each device quantizes its rows, and a whole array is one device's, bit for bit."""
    mesh = mesh_of(AxisType.Explicit, data=2)
    rows = rng.standard_normal((M, K)).astype(np.float32)
    (x,) = placed(mesh, [rows], [P("data")])

    def values(x: Any) -> Any:
        return octavo_jax.dequantize(octavo_jax.quantize(x, SPEC))

    with jax.set_mesh(mesh):
        cut = jax.jit(jax.shard_map(values, in_specs=P("data"), out_specs=P("data")))(x)
        whole = jax.jit(lambda x: values(jax.sharding.reshard(x, P())))(x)  # type: ignore[no-untyped-call]
    wanted = values(jnp.asarray(rows))
    assert np.array_equal(cut, wanted)
    assert np.array_equal(whole, wanted)


@pytest.mark.parametrize(
    "kept", [{"form": "lean"}, {"form": "recompute"}, {"weight_codes": "remake"}], ids=lambda kept: next(iter(kept))
)
def test_what_a_cut_block_cannot_keep_is_refused(kept: Any, mesh_of: Any, placed: Any) -> None:
    """Outside of jax.shard_map rows of experts are kept as grouped_mlp keeps them: other memory was asked for."""
    mesh = mesh_of(AxisType.Explicit, data=2)
    x, routing = jnp.ones((M, K)), _routing()
    with jax.set_mesh(mesh), pytest.raises(ValueError, match=r"rows that a mesh cuts .*, so leave both out, or use"):
        moe.routed_mlp(x, routing, *KERNELS, recipe=None, sharding=octavo_jax.MeshAxes(dp="data"), **kept)

"""The linen and nnx modules: parameters, seeds, delayed scaling's collection, checkpoint names."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import octavo
import octavo_jax
from octavo_jax import linen as octavo_linen
from octavo_jax import nnx as octavo_nnx

M, K, N, G = 32, 16, 8, 3
SIZES = jnp.array([10, 0, 15])
STOCHASTIC = octavo.NVFP4(hadamard=False)
DELAYED = octavo.DelayedScaling(history=4)


@pytest.fixture
def x(rng: np.random.Generator) -> Any:
    """Rows with a NaN tail."""
    rows = rng.standard_normal((M, K)).astype(np.float32)
    rows[25:] = np.nan
    return jnp.asarray(rows)


def test_linen_equals_the_function(x: Any) -> None:
    """The module is grouped_dense of its parameters, seed drawn from the stream "quantization"."""
    module: Any = octavo_linen.GroupedDense(G, N, recipe=STOCHASTIC, use_bias=True, dtype=jnp.bfloat16)
    keys = {"params": jax.random.key(0), "quantization": jax.random.key(1)}
    variables = module.init(keys, x, SIZES)
    assert variables["params"]["kernel"].shape == (G, K, N)
    assert variables["params"]["kernel"].dtype == jnp.float32
    kernel, bias = (variables["params"][name].astype(jnp.bfloat16) for name in ("kernel", "bias"))
    wanted = octavo_jax.grouped_dense(x.astype(jnp.bfloat16), kernel, SIZES, recipe=STOCHASTIC, bias=bias, seed=0)
    assert np.array_equal(module.apply(variables, x, SIZES, seed=0), wanted)

    @jax.jit
    def gradient(key: int) -> Any:
        rngs = {"quantization": jax.random.key(key)}
        return jax.grad(lambda v: jnp.sum(module.apply(v, x, SIZES, rngs=rngs)[:25] ** 2))(variables)

    first, again, other = (gradient(key)["params"]["kernel"] for key in (2, 2, 3))
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)
    assert not np.asarray(first)[1].any()


def test_linen_keeps_delayed_scaling_in_flax_collection(x: Any) -> None:
    """The collection's gradient is its new value; update_state turns it into the next step's scales."""
    module: Any = octavo_linen.GroupedDense(G, N, recipe=DELAYED)
    variables = module.init(jax.random.key(0), x, SIZES)
    collection = octavo_linen.STATE_COLLECTION
    gradient = jax.jit(jax.grad(lambda v: jnp.sum(module.apply(v, x, SIZES)[:25] ** 2)))(variables)
    state = octavo_linen.update_state(gradient[collection], DELAYED)["state"]
    amax = np.abs(np.asarray(x))[:10].max()
    assert state.x.history[-1, 0] == amax
    assert state.x.scale[0] == np.float32(448) / amax
    assert state.grad.scale[1] == 1
    assert state.grad.history[-1, 0] > 0
    _, recorded = module.apply(variables, x, SIZES, mutable=[collection])
    assert recorded[collection]["state"].x.history[0, 0] == amax


def test_nnx_trains_with_its_own_seed_and_state(x: Any) -> None:
    """Gradients of parameters and state through nnx.grad; each call of a stochastic recipe takes another seed."""
    wrt = nnx.DiffState(0, nnx.Any(nnx.Param, octavo_nnx.ScalingState))

    @nnx.jit
    def step(module: Any) -> Any:
        return nnx.grad(lambda m: jnp.sum(m(x, SIZES)[:25] ** 2), argnums=wrt)(module)

    stochastic: Any = octavo_nnx.GroupedLinear(G, K, N, recipe=STOCHASTIC, use_bias=True, rngs=nnx.Rngs(0))
    first, second = (step(stochastic)["kernel"][...] for _ in range(2))
    assert first.shape == (G, K, N)
    assert not np.array_equal(first, second)
    assert int(stochastic.calls[...]) == 2
    delayed: Any = octavo_nnx.GroupedLinear(G, K, N, recipe=DELAYED, rngs=nnx.Rngs(0))
    state = step(delayed)["delayed"].get_value()
    assert state.grad.history[0, 0] > 0
    delayed.delayed.set_value(octavo_jax.update_delayed(state, DELAYED))
    assert delayed.delayed.get_value().x.history[-1, 0] == np.abs(np.asarray(x))[:10].max()


@pytest.mark.parametrize("flavour", ["linen", "nnx"])
def test_modules_name_what_they_quantize(flavour: str, x: Any, equations: Callable[..., int]) -> None:
    """quantization_checkpoint_name reaches the quantizers: under its policy nothing is quantized twice."""
    recipe = octavo.recipe("mxfp8")
    argument: Any
    if flavour == "linen":
        module: Any = octavo_linen.GroupedDense(G, N, recipe=recipe, quantization_checkpoint_name="mine")
        variables = module.init(jax.random.key(0), x, SIZES)
        call, argument = lambda v: jnp.tanh(module.apply(v, x, SIZES)), variables
    else:
        graph, params = nnx.split(
            octavo_nnx.GroupedLinear(G, K, N, recipe=recipe, quantization_checkpoint_name="mine", rngs=nnx.Rngs(0))
        )
        call, argument = lambda p: jnp.tanh(nnx.merge(graph, p)(x, SIZES)), params
    for name, count in (("mine", 3), ("quantization", 5)):
        kept = jax.checkpoint(call, policy=octavo_jax.policies.save_quantized(name))
        program = jax.make_jaxpr(jax.grad(lambda a, f=kept: jnp.sum(f(a)[:25])))(argument)
        assert equations(program.jaxpr, "octavo_quantize") == count


def test_pytrees_survive_pickle_and_flatten(rng: np.random.Generator) -> None:
    """GroupedTensor and QuantizerSet keep every field through flatten, pickle and tree.map to non-arrays."""
    spec = octavo.NVFP4().quantizer("x")
    assert spec is not None
    q = octavo_jax.quantize(rng.standard_normal((20, 16)).astype(np.float32), spec, [7, 9])
    leaves, structure = jax.tree.flatten(q)
    for copy in (jax.tree.unflatten(structure, leaves), pickle.loads(pickle.dumps(q))):
        assert copy.spec == q.spec
        assert np.asarray(copy.columnwise).tobytes() == np.asarray(q.columnwise).tobytes()
        assert np.asarray(copy.group_sizes).tolist() == [7, 9]
    shapes = jax.tree.map(lambda leaf: leaf.shape, q)
    assert shapes.rowwise == (20, 16)
    quantizers = octavo_jax.quantizer_set(octavo.NVFP4(), checkpoint_name="mine")
    assert pickle.loads(pickle.dumps(quantizers)) == quantizers

"""nnx modules under nnx's own machinery: jit, grad, split and merge, vmap, scan, remat, seeds, the state, axes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from flax.errors import TraceContextError
from jax.sharding import PartitionSpec as P

import octavo
import octavo_jax
from octavo_jax import nnx as octavo_nnx
from octavo_jax.counting import count_runs
from octavo_jax.nnx import grouped
from octavo_jax.policies import save_quantized

M, K, N, G, LAYERS = 32, 16, 8, 3, 5
SIZES = jnp.array([10, 0, 15])
STOCHASTIC = octavo.NVFP4(hadamard=False)
DELAYED = octavo.DelayedScaling(history=4)
BOTH = nnx.Any(nnx.Param, octavo_nnx.ScalingState)


@nnx.jit
def _step(module: Any, x: Any) -> Any:
    wrt = nnx.DiffState(0, BOTH)
    return nnx.grad(lambda m: jnp.sum(m(x, SIZES)[:25] ** 2), argnums=wrt)(module)


def test_each_call_takes_another_seed(x: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """base_seed + calls, counted under nnx.jit; a given seed is taken as it is and not counted (faults.md 40)."""

    def seeds(x: Any, *_: Any, seed: Any, **__: Any) -> Any:
        return seed

    monkeypatch.setattr(grouped, "grouped_dense", seeds)
    module: Any = octavo_nnx.GroupedLinear(G, K, N, recipe=STOCHASTIC, rngs=nnx.Rngs(0))
    call = nnx.jit(lambda module, x: module(x, SIZES))
    seen = [np.asarray(call(module, x)).tolist() for _ in range(3)]
    base = np.asarray(module.base_seed[...])
    assert seen == [[int(base[0]) + i, int(base[1])] for i in range(3)]
    assert int(module.calls[...]) == 3
    assert module(x, SIZES, seed=7) == 7
    assert int(module.calls[...]) == 3


def test_calls_are_not_counted_in_a_file(x: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A state of numpy's arrays, as a file and `jax.device_get` give it, goes on: without nnx.jit its count was raised
    in the array that the caller holds, or refused where that is read-only."""
    monkeypatch.setattr(grouped, "grouped_dense", lambda x, *_, seed, **__: seed)
    module: Any = octavo_nnx.GroupedLinear(G, K, N, recipe=STOCHASTIC, rngs=nnx.Rngs(0))
    module(x, SIZES)
    for writable in (True, False):
        saved = jax.tree.map(np.array, nnx.state(module))
        jax.tree.map(lambda array, flag=writable: array.setflags(write=flag), saved)
        wanted = [np.asarray(module(x, SIZES)) for _ in range(2)]
        nnx.update(module, saved)
        assert np.array_equal([module(x, SIZES) for _ in range(2)], wanted)
        assert int(saved["calls"][...]) == int(module.calls[...]) - 2


def test_a_call_that_cannot_be_counted_says_what_to_do(x: Any) -> None:
    """Flax's own sentence speaks of a SeedState that cannot be mutated, which no user has written; a seed of the call's
    own needs no count."""
    module: Any = octavo_nnx.GroupedLinear(G, K, N, recipe=STOCHASTIC, rngs=nnx.Rngs(0))
    with pytest.raises(TraceContextError, match=r"as in nnx\.jit\(.*\)\(module, x\), or give the call a seed"):
        jax.eval_shape(lambda x: module(x, SIZES), x)
    assert jax.eval_shape(lambda x: module(x, SIZES, seed=3), x).shape == (M, N)
    assert int(module.calls[...]) == 0


def test_gradient_accumulation_and_the_end_of_a_step(x: Any) -> None:
    """Overwrite the state after each microbatch, end the step once: amaxes are maxima, empty groups keep scales."""
    module: Any = octavo_nnx.GroupedLinear(G, K, N, recipe=DELAYED, rngs=nnx.Rngs(0))
    for rows in (x, 2 * x):
        gradients = _step(module, rows)
        assert gradients["kernel"].shape == (G, K, N)
        nnx.update(module, nnx.filter_state(gradients, octavo_nnx.ScalingState))
    recorded = module.delayed.get_value()
    amax = 2 * np.abs(np.asarray(x))[:10].max()
    assert recorded.x.history[0, 0] == amax
    assert recorded.grad.history[0, 0] > 0
    nnx.jit(partial(octavo_nnx.update_state, recipe=DELAYED))(module)
    state = module.delayed.get_value()
    assert state.x.history[-1, 0] == amax
    assert state.x.scale[0] == np.float32(448) / amax
    assert state.grad.scale[1] == state.x.scale[1] == 1


def _loss(module: Any, x: Any) -> Any:
    return jnp.sum(module(x, SIZES)[:25] ** 2)


def _carried(module: Any, xs: Any) -> Any:
    @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=(nnx.Carry, 0))
    def body(module: Any, x: Any) -> Any:
        return module, _loss(module, x)

    return jnp.sum(body(module, xs)[1])


def _remade(module: Any, xs: Any) -> Any:
    graph, values = nnx.split(module)
    module = nnx.merge(graph, values)
    return _loss(module, xs[0]) + _loss(module, xs[1])


TWICE: dict[str, Callable[[Any, Any], Any]] = {
    "in turn": lambda module, xs: _loss(module, xs[0]) + _loss(module, xs[1]),
    "nnx.remat": lambda module, xs: nnx.remat(_loss)(module, xs[0]) + nnx.remat(_loss)(module, xs[1]),
    "nnx.jit": lambda module, xs: nnx.jit(_loss)(module, xs[0]) + _loss(module, xs[1]),
    "nnx.scan": _carried,
    "nnx.vmap": lambda module, xs: jnp.sum(nnx.vmap(_loss, in_axes=(None, 0))(module, xs)),
    "nnx.merge": _remade,
}


def _scaled_module(rng: np.random.Generator) -> Any:
    """A layer in the middle of training, whose state would show that it was added to another."""
    module: Any = octavo_nnx.GroupedLinear(G, K, N, recipe=DELAYED, backend="jax-reference", rngs=nnx.Rngs(0))
    state = module.delayed.get_value()
    drawn = jax.tree.map(lambda leaf: jnp.asarray(rng.uniform(0.5, 2, leaf.shape), jnp.float32), state)
    module.delayed.set_value(drawn)
    return module


@partial(jax.jit, static_argnums=0)
def _threaded(layer: Callable[..., Any], kernel: Any, state: Any, xs: Any) -> Any:
    def loss(kernel: Any, state: Any) -> Any:
        total: Any = 0.0
        for x in xs:
            y, state = layer(x, kernel, SIZES, recipe=DELAYED, state=state, backend="jax-reference")
            total = total + jnp.sum(y[:25] ** 2)
        return total

    return jax.grad(loss, (0, 1))(kernel, state)


@pytest.mark.parametrize("way", TWICE)
def test_two_calls_thread_their_state(
    way: str, x: Any, rng: np.random.Generator, recording_layer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A module that is called twice in one differentiated function records what two calls of the function do whose
    state is threaded, bit for bit; JAX would add up the states, so that scales double. The layer itself has a part in
    it where vmap makes one call of them; two in turn are test_delayed_state.py's."""
    layer = octavo_jax.grouped_dense
    if way != "nnx.vmap":
        layer = recording_layer
        monkeypatch.setattr(grouped, "grouped_dense", layer)
    module = _scaled_module(rng)
    xs = jnp.stack([x, 3 * x])
    kernel, state = _threaded(layer, module.kernel[...], module.delayed.get_value(), xs)
    step = nnx.jit(nnx.grad(TWICE[way], argnums=nnx.DiffState(0, BOTH)))
    gradients = step(module, xs)
    made = gradients["delayed"].get_value()
    for (path, a), b in zip(jax.tree.leaves_with_path(made), jax.tree.leaves(state), strict=True):
        assert np.array_equal(a, b), path
    assert np.array_equal(gradients["kernel"].get_value(), kernel)


def test_a_state_that_a_call_cannot_keep_is_refused(x: Any, rng: np.random.Generator) -> None:
    """A module from outside of a transformation of JAX's own keeps nothing there: several calls would be added up."""
    module, xs = _scaled_module(rng), jnp.stack([x, x])
    scans: Any = lambda module: jax.lax.scan(lambda sum, x: (sum + _loss(module, x), None), 0.0, xs)[0]  # noqa: E731
    with pytest.raises(ValueError, match=r"as in nnx\.remat\(lambda module, x: module\(x\)\)\(module, x\)"):
        nnx.grad(scans, argnums=nnx.DiffState(0, BOTH))(module)
    with pytest.warns(UserWarning, match="its DelayedState is not"):
        nnx.grad(scans)(module)


def test_evaluation_records_nothing(x: Any, rng: np.random.Generator) -> None:
    """Whatever the transformation: what no derivative is taken of is no step."""
    module = _scaled_module(rng)
    before = module.delayed.get_value()
    nnx.jit(_loss)(module, x)
    nnx.vmap(_loss, in_axes=(None, 0))(module, x[None])
    jax.jit(jax.vmap(partial(_loss, module)))(x[None])
    assert jax.tree.all(jax.tree.map(np.array_equal, module.delayed.get_value(), before))


def test_a_recipe_that_is_changed(x: Any, rng: np.random.Generator) -> None:
    """Evaluation in another recipe leaves the state of delayed scaling alone, as in linen; a call said to leave out a
    state that its user had not given. A module that was made without a state says how it gets one."""
    module = _scaled_module(rng)
    before = module.delayed.get_value()
    for recipe in (None, "fp8-row"):
        evaluated = nnx.clone(module)
        evaluated.set_attributes(recipe=recipe)
        wanted = octavo_jax.grouped_dense(x, module.kernel[...], SIZES, recipe=recipe, backend="jax-reference")
        assert np.array_equal(evaluated(x, SIZES), wanted)
        assert jax.tree.all(jax.tree.map(np.array_equal, evaluated.delayed.get_value(), before))
    plain: Any = octavo_nnx.GroupedLinear(G, K, N, recipe=None, backend="jax-reference", rngs=nnx.Rngs(0))
    plain.recipe = DELAYED
    with pytest.raises(ValueError, match=r"GroupedLinear has the recipe delayed and no state.*delayed = octavo_jax"):
        plain(x, SIZES)
    plain.delayed = octavo_nnx.ScalingState(octavo_jax.init_delayed(DELAYED, G))
    assert plain(x, SIZES).shape == (M, N)


def test_vmapped_layers_under_scan_and_remat(x: Any) -> None:
    """Five stacked layers with nnx.scan and nnx.remat: 15 quantizations under save_quantized, 25 without.

    Their states come back stacked and are updated one by one.
    """

    @nnx.split_rngs(splits=LAYERS)
    @nnx.vmap
    def make(rngs: nnx.Rngs) -> Any:
        return octavo_nnx.GroupedLinear(G, K, K, recipe=DELAYED, rngs=rngs)

    module: Any = make(nnx.Rngs(0))
    assert module.kernel.shape == (LAYERS, G, K, K)

    def loss(module: Any, policy: Any) -> Any:
        @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
        @partial(nnx.remat, policy=policy, prevent_cse=False)
        def forward(layer: Any, x: Any) -> Any:
            return jnp.tanh(layer(x, SIZES))

        return jnp.sum(forward(module, x)[:25])

    graph, values = nnx.split(module)

    def gradient(values: Any, policy: Any) -> Any:
        return nnx.value_and_grad(partial(loss, policy=policy), argnums=nnx.DiffState(0, BOTH))(
            nnx.merge(graph, values)
        )

    for policy, wanted in ((save_quantized(), 15), (None, 25)):
        assert count_runs(partial(gradient, policy=policy), values).quantize == wanted
    _, gradients = jax.jit(partial(gradient, policy=save_quantized()))(values)
    nnx.update(module, nnx.filter_state(gradients, octavo_nnx.ScalingState))
    octavo_nnx.update_state(module, DELAYED)
    state = module.delayed.get_value()
    assert state.x.scale.shape == (LAYERS, G)
    assert len(np.unique(np.asarray(state.grad.scale[:, 0]))) == LAYERS


def test_split_and_merge_keep_a_module(x: Any) -> None:
    """A block with every kind of variable survives nnx.split and nnx.merge, biases that are absent included."""
    block: Any = octavo_nnx.MoE(G, K, 4, k=2, recipe=DELAYED, rngs=nnx.Rngs(0))
    graph, params, states = nnx.split(block, nnx.Param, octavo_nnx.ScalingState)
    assert set(params) == {"router", "wi", "wo"}
    assert set(states) == {"delayed"}
    again = nnx.merge(graph, params, states)
    assert (again.wi_bias, again.k, again.recipe) == (None, 2, DELAYED)
    run = nnx.jit(lambda module, x: module(x[:25])[0])
    assert np.array_equal(run(block, x), run(again, x))
    stochastic: Any = octavo_nnx.LayerNormMLP(K, 4, norm="layer", recipe=STOCHASTIC, rngs=nnx.Rngs(0))
    _, params, seeds = nnx.split(stochastic, nnx.Param, octavo_nnx.SeedState)
    assert set(params) == {"scale", "norm_bias", "wi", "wo"}
    assert set(seeds) == {"base_seed", "calls"}


def test_logical_axes() -> None:
    """kernel_axes and the others become the parameters' sharding names, which `nnx.get_partition_spec` reads."""
    with nnx.use_eager_sharding(False):
        module = octavo_nnx.LayerNormLinear(
            K, N, recipe=None, kernel_axes=("embed", "mlp"), bias_axes=("mlp",), scale_axes=("embed",), rngs=nnx.Rngs(0)
        )
        spec = nnx.get_partition_spec(nnx.state(module, nnx.Param))
    assert spec["kernel"].get_value() == P("embed", "mlp")
    assert spec["bias"].get_value() == P("mlp")
    assert spec["scale"].get_value() == P("embed")

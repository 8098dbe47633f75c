"""linen modules under Flax's own machinery: streams of seeds, scan, remat, the state's collection, logical axes."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import serialization
from flax.errors import InvalidRngError
from jax.sharding import PartitionSpec as P

import octavo
import octavo_jax
from octavo_jax import linen as octavo_linen
from octavo_jax.counting import count_runs
from octavo_jax.linen import STATE_COLLECTION
from octavo_jax.policies import save_quantized
from octavo_numerics import error_bound

M, K, N, G, LAYERS = 32, 16, 8, 3, 5
SIZES = jnp.array([10, 0, 15])
STOCHASTIC = octavo.NVFP4(hadamard=False, fprop="high_precision", dgrad="high_precision")  # in wgrad, and no more
DELAYED = octavo.DelayedScaling(history=4)


def test_a_stochastic_module_draws_its_seed(x: Any) -> None:
    """The module is grouped_dense of its parameters; gradients follow the stream "quantization" and nothing else."""
    module: Any = octavo_linen.GroupedDense(G, N, recipe=STOCHASTIC, use_bias=True, dtype=jnp.bfloat16)
    keys = {"params": jax.random.key(0), "quantization": jax.random.key(1)}
    variables = jax.jit(module.init)(keys, x, SIZES)
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


def test_a_stochastic_module_without_its_stream_says_what_to_give(x: Any) -> None:
    """Flax's own sentence would be 'None needs PRNG', as the module at the root has no name."""
    module: Any = octavo_linen.GroupedDense(G, N, recipe=STOCHASTIC)
    variables = module.init(jax.random.key(0), x, SIZES)
    with pytest.raises(InvalidRngError, match=r"recipe nvfp4, which rounds .* rngs=\{'quantization': key\}"):
        module.apply(variables, x, SIZES)
    transformed: Any = nn.vmap(
        octavo_linen.GroupedDense, variable_axes={"params": None}, split_rngs={}, in_axes=(0, None)
    )(G, N, recipe=STOCHASTIC)
    with pytest.raises(InvalidRngError, match=r"told of, split_rngs=\{'quantization': True\}"):  # it was given to apply
        transformed.apply(variables, x[None], SIZES, rngs={"quantization": jax.random.key(1)})


class Layer(nn.Module):
    """A grouped layer whose activation needs y, as the body of a scan."""

    recipe: Any

    @nn.compact
    def __call__(self, x: Any, sizes: Any) -> tuple[Any, Any]:
        """(the next x, y)."""
        y = octavo_linen.GroupedDense(G, K, recipe=self.recipe, name="dense", kernel_axes=("experts", None, "mlp"))(
            x, sizes
        )
        return jnp.tanh(y), y


def _stack(policy: Any, recipe: Any) -> Any:
    body = nn.remat(Layer, policy=policy, prevent_cse=False)
    axes = {"params": 0, STATE_COLLECTION: 0}
    scan = nn.scan(
        body,
        variable_axes=axes,
        split_rngs={"params": True, "quantization": True},
        in_axes=nn.broadcast,
        length=LAYERS,
        metadata_params={nn.PARTITION_NAME: "layers"},
    )
    return scan(recipe=recipe)


def test_scan_and_remat(x: Any) -> None:
    """Five scanned layers under save_quantized quantize x, kernel and dy once each: 15 runs, and 25 without the policy.

    The state's gradient comes back stacked, and update_state makes each layer's own scales of it; logical axes get the
    scan's in front.
    """
    module = _stack(save_quantized(), DELAYED)
    variables = jax.jit(module.init)(jax.random.key(0), x, SIZES)
    spec = nn.get_partition_spec(variables)["params"]["dense"]["kernel"]
    assert spec == P("layers", "experts", None, "mlp")
    variables = nn.meta.unbox(variables)
    assert variables["params"]["dense"]["kernel"].shape == (LAYERS, G, K, K)

    def loss(variables: Any, policy: Any) -> Any:
        return jnp.sum(_stack(policy, DELAYED).apply(variables, x, SIZES)[0][:25])

    for policy, wanted in ((save_quantized(), 15), (None, 25)):
        assert count_runs(jax.value_and_grad(partial(loss, policy=policy)), variables).quantize == wanted
    gradient = jax.jit(jax.grad(partial(loss, policy=save_quantized())))(variables)[STATE_COLLECTION]
    state = octavo_linen.update_state(gradient, DELAYED)["dense"]["state"]
    assert state.x.scale.shape == (LAYERS, G)
    one_by_one = [
        octavo_jax.update_delayed(jax.tree.map(lambda a, i=i: a[i], gradient["dense"]["state"]), DELAYED)
        for i in range(LAYERS)
    ]
    wanted_state = jax.tree.map(lambda *a: np.stack(a), *one_by_one)
    assert jax.tree.all(jax.tree.map(np.array_equal, state, wanted_state))
    assert state.x.scale[0, 0] == np.float32(448) / np.abs(np.asarray(x))[:10].max()
    assert len(np.unique(np.asarray(state.grad.scale[:, 0]))) == LAYERS


def test_gradient_accumulation_takes_the_whole_batchs_amax(rng: np.random.Generator) -> None:
    """Overwritten after each of three microbatches and updated once: the scales of one batch of all of them.

    A group that is empty in some microbatches keeps what the others recorded, one that is empty in all keeps its
    scale; a microbatch without a row changes nothing of x and dy. Summing the gradients instead would be wrong.
    """
    module: Any = octavo_linen.GroupedDense(G, N, recipe=DELAYED)
    sizes = np.array([[4, 0, 6], [0, 0, 8], [0, 0, 0]])
    rows, dys = (rng.standard_normal((3, G, M, n)).astype(np.float32) for n in (K, N))

    def batch(parts: Any, counts: Any) -> Any:
        """Rows by group of several microbatches, and a NaN tail."""
        groups = [a[g, : c[g]] for g in range(G) for a, c in zip(parts, counts, strict=True)]
        ragged = np.concatenate(groups)
        return np.pad(ragged, ((0, M - len(ragged)), (0, 0)), constant_values=np.nan)

    variables = jax.jit(module.init)(jax.random.key(0), jnp.ones((M, K)), SIZES)

    @jax.jit
    def state_after(state: Any, x: Any, dy: Any, sizes: Any) -> Any:
        def loss(state: Any) -> Any:
            return jnp.sum(module.apply({**variables, STATE_COLLECTION: state}, x, sizes) * dy)

        return jax.grad(loss)(state)

    update = jax.jit(partial(octavo_linen.update_state, recipe=DELAYED))
    start = state = variables[STATE_COLLECTION]
    for i in range(3):
        state = state_after(state, *(batch(a[i : i + 1], sizes[i : i + 1]) for a in (rows, dys)), sizes[i])
    whole = state_after(start, batch(rows, sizes), batch(dys, sizes), sizes.sum(0))
    accumulated, wanted = update(state)["state"], update(whole)["state"]
    assert jax.tree.all(jax.tree.map(np.array_equal, accumulated, wanted))
    assert np.asarray(accumulated.x.scale != 1).tolist() == [True, False, True]
    assert np.asarray(accumulated.grad.scale != 1).tolist() == [True, False, True]


def test_a_module_without_its_state_says_what_to_give(x: Any) -> None:
    """A program that was written for other recipes gives the parameters alone."""
    module: Any = octavo_linen.GroupedDense(G, N, recipe=DELAYED)
    variables = module.init(jax.random.key(0), x, SIZES)
    with pytest.raises(ValueError, match=r"GroupedDense has the recipe delayed, .* linen\.STATE_COLLECTION: state"):
        module.apply({"params": variables["params"]}, x, SIZES)
    assert module.apply(variables, x, SIZES).shape == (M, N)


def test_a_mutable_collection_threads_the_state(x: Any) -> None:
    """Where `_overwrite_with_gradient` is mutable, a module that is called twice records both calls' amaxes."""
    module: Any = octavo_linen.GroupedDense(G, N, recipe=DELAYED)
    variables = jax.jit(module.init)(jax.random.key(0), x, SIZES)
    assert not np.asarray(variables[STATE_COLLECTION]["state"].x.history).any()  # init records nothing

    def twice(module: Any) -> Any:
        return module(x, SIZES), module(3 * x, SIZES)

    _, recorded = jax.jit(partial(module.apply, method=twice, mutable=[STATE_COLLECTION]))(variables)
    state = recorded[STATE_COLLECTION]["state"]
    assert state.x.history[0, 0] == 3 * np.abs(np.asarray(x))[:10].max()
    assert state.x.history[0, 1] == 0


def test_flaxs_jit_takes_a_recipe_that_was_used(x: Any) -> None:
    """It hashes a module by walking through its fields, the recipe's own among them."""
    plain: Any = octavo_linen.GroupedDense(G, N, recipe=DELAYED)
    variables = plain.init(jax.random.key(0), x, SIZES)
    jitted: Any = nn.jit(octavo_linen.GroupedDense)(G, N, recipe=DELAYED)
    assert np.array_equal(jitted.apply(variables, x, SIZES), plain.apply(variables, x, SIZES))


def test_flax_writes_and_restores_the_state(x: Any) -> None:
    """Bytes of variables with delayed scaling, whose state is a dataclass of its own kind, are those variables."""
    module: Any = octavo_linen.GroupedDense(G, N, recipe=DELAYED)
    variables = module.init(jax.random.key(0), x, SIZES)
    variables = jax.tree.map(lambda a: jnp.arange(a.size, dtype=a.dtype).reshape(a.shape), variables)
    target = jax.eval_shape(module.init, jax.random.key(0), x, SIZES)
    restored = serialization.from_bytes(target, serialization.to_bytes(variables))
    assert jax.tree.structure(restored) == jax.tree.structure(variables)
    assert jax.tree.all(jax.tree.map(np.array_equal, restored, variables))
    written = serialization.to_state_dict(variables[STATE_COLLECTION]["state"])
    del written["grad"]
    with pytest.raises(ValueError, match=r"state dict of a DelayedState has \['kernel', 'x'\]; give one"):
        serialization.from_state_dict(target[STATE_COLLECTION]["state"], written)


def test_two_calls_with_one_state_are_refused(x: Any) -> None:
    """JAX would add up the two states: within one apply whose collection is not mutable, and in two applies. Branches
    of which one is taken, calls without a derivative and those of a stopped gradient are none of it."""
    module: Any = octavo_linen.GroupedDense(G, N, recipe=DELAYED)
    variables = jax.jit(module.init)(jax.random.key(0), x, SIZES)

    def once(variables: Any, x: Any) -> Any:
        return jnp.sum(module.apply(variables, x, SIZES)[:25])

    def twice(variables: Any) -> Any:
        return jnp.sum(module.apply(variables, method=lambda m: m(x, SIZES) + m(2 * x, SIZES))[:25])

    def stopped(variables: Any) -> Any:
        return once(variables, x) + once(jax.lax.stop_gradient(variables), x)

    for loss in (twice, lambda v: once(v, x) + once(v, 2 * x)):
        with pytest.raises(ValueError, match="two calls in one differentiated function took one state of the collect"):
            jax.eval_shape(jax.grad(loss), variables)
        jax.eval_shape(loss, variables)
    jax.eval_shape(jax.grad(stopped), variables)
    branches = (lambda v: lambda: once(v, x)), (lambda v: lambda: once(v, 2 * x))
    jax.eval_shape(jax.grad(lambda v: jax.lax.cond(x[0, 0] > 0, *(one(v) for one in branches))), variables)


def test_dense_general_is_flaxs(rng: np.random.Generator) -> None:
    """Axes and features as flax.linen.DenseGeneral: the same initial kernel of the same key, the same y."""
    x = jnp.asarray(rng.standard_normal((4, 5, 3, 6)), jnp.float32)

    def both(axis: Any, features: Any) -> list[Any]:
        made = []
        for module in (octavo_linen.DenseGeneral(features, axis, recipe=None), nn.DenseGeneral(features, axis)):
            y, variables = module.init_with_output(jax.random.key(0), x)
            made.append((y, variables["params"]))
        return made

    ours, theirs = jax.jit(partial(both, (1, -1), (2, 7)))()
    assert np.array_equal(ours[1]["kernel"], theirs[1]["kernel"])
    a = np.moveaxis(np.asarray(x), (1, 3), (2, 3)).reshape(12, 30)
    b = np.asarray(theirs[1]["kernel"]).reshape(30, 14).T
    bound = error_bound(octavo.HighPrecision(), 30, out_dtype="float32")
    report = bound.check(np.asarray(ours[0]).reshape(12, 14), a, b, zero_mean=False)
    assert report.passed, report.describe()
    for axis, features in ((-1, 7), ((-1, 0), 2)):
        shapes = [jax.tree.map(jnp.shape, made) for made in jax.eval_shape(partial(both, axis, features))]
        assert shapes[0] == shapes[1]
    for bad, sentence in (((1, 1), "name distinct axes"), (4, "name distinct axes"), ((), "axis is empty")):
        with pytest.raises(ValueError, match=sentence):
            jax.eval_shape(octavo_linen.DenseGeneral(2, bad, recipe=None).init, jax.random.key(0), x)


def test_logical_axes_of_every_parameter() -> None:
    """kernel_axes, bias_axes, scale_axes and an MLP's own are what `nn.get_partition_spec` says."""
    x = jnp.ones((2, K))
    norm: Any = octavo_linen.LayerNormDenseGeneral(
        (N, 3),
        norm="layer",
        recipe=None,
        kernel_axes=("embed", "mlp", None),
        bias_axes=("mlp", None),
        scale_axes=("embed",),
    )
    spec = nn.get_partition_spec(jax.eval_shape(norm.init, jax.random.key(0), x))["params"]
    assert spec == {
        "kernel": P("embed", "mlp", None),
        "bias": P("mlp", None),
        "scale": P("embed"),
        "norm_bias": P("embed"),
    }
    block: Any = octavo_linen.MoE(
        recipe=None,
        num_experts=G,
        hidden=4,
        k=1,
        use_bias=True,
        router_axes=("embed", None),
        wi_axes=("experts", "embed", "mlp"),
        wo_axes=("experts", "mlp", "embed"),
        wi_bias_axes=("experts", "mlp"),
        wo_bias_axes=("experts", "embed"),
    )
    spec = nn.get_partition_spec(jax.eval_shape(block.init, jax.random.key(0), x))["params"]
    assert spec == {
        "router": P("embed", None),
        "wi": P("experts", "embed", "mlp"),
        "wo": P("experts", "mlp", "embed"),
        "wi_bias": P("experts", "mlp"),
        "wo_bias": P("experts", "embed"),
    }

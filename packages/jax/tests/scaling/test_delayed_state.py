"""Delayed scaling's state: recorded through forward and backward, updated once a step, equal to the definition."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import octavo
import octavo_jax
import octavo_numerics
from octavo_jax import DelayedState, ScalingHistory

G, M, K, N = 3, 24, 16, 8
RECIPE = octavo.DelayedScaling(history=4, margin=1)


def _definition(state: ScalingHistory) -> octavo_numerics.DelayedState:
    return octavo_numerics.DelayedState(np.array(state.history), np.array(state.scale))


def _equal(state: ScalingHistory, expected: octavo_numerics.DelayedState) -> bool:
    pairs = ((state.history, expected.history), (state.scale, expected.scale))
    return all(np.array_equal(np.asarray(a).view(np.uint32), b.view(np.uint32)) for a, b in pairs)


def _amax(x: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    ends = np.cumsum(sizes)
    return np.array([np.abs(x[e - s : e]).max(initial=0) for e, s in zip(ends, sizes, strict=True)], np.float32)


def _step(x: Any, kernel: Any, sizes: Any, dy: Any, state: DelayedState) -> tuple[Any, DelayedState, DelayedState]:
    """(y, the second result, the state's "gradient")."""

    def loss(state: DelayedState) -> tuple[Any, Any]:
        y, recorded = octavo_jax.grouped_dense(x, kernel, sizes, recipe=RECIPE, state=state)
        return jnp.sum(y * dy), (y, recorded)

    gradient, (y, recorded) = jax.grad(loss, has_aux=True)(state)
    return y, recorded, gradient


def test_five_steps_of_two_microbatches_equal_the_definition(rng: np.random.Generator) -> None:
    """Scales and histories of x, kernel and dy; a group without tokens keeps its own; two microbatches take a maximum.

    Overwriting the state with its gradient after each microbatch is gradient accumulation done right.
    """
    step, update = jax.jit(_step), jax.jit(lambda state: octavo_jax.update_delayed(state, RECIPE))
    state = octavo_jax.init_delayed(RECIPE, G)
    expected = {name: octavo_numerics.init_delayed(G, RECIPE.history) for name in ("x", "kernel", "grad")}
    formats = {"x": RECIPE.forward_format, "kernel": RECIPE.forward_format, "grad": RECIPE.gradient_format}
    for sizes in ([8, 0, 10], [5, 5, 5], [0, 0, 24], [0, 0, 0], [24, 0, 0]):
        for _ in range(2):
            counts = np.array(sizes, np.int32)
            x, dy = (rng.standard_normal((M, columns)).astype(np.float32) for columns in (K, N))
            x[counts.sum() :] = dy[counts.sum() :] = np.nan
            kernel = rng.standard_normal((G, K, N)).astype(np.float32)
            _, recorded, state = step(x, kernel, counts, dy, state)
            record = octavo_numerics.record_amax
            expected["x"] = record(expected["x"], _amax(x, counts))
            expected["kernel"] = record(expected["kernel"], np.abs(kernel).max((1, 2)))
            assert _equal(recorded.x, expected["x"])
            assert _equal(recorded.kernel, expected["kernel"])
            assert _equal(recorded.grad, expected["grad"])
            expected["grad"] = record(expected["grad"], _amax(dy, counts))
            assert _equal(state.x, expected["x"])
            assert _equal(state.grad, expected["grad"])
        state = update(state)
        for name, fmt in formats.items():
            expected[name] = octavo_numerics.update_delayed(expected[name], fmt, margin=RECIPE.margin)
            assert _equal(getattr(state, name), expected[name]), f"{name} after sizes {sizes}"


@pytest.mark.parametrize("algorithm", ["max", "most_recent"])
def test_update_of_any_amax(algorithm: Any, rng: np.random.Generator) -> None:
    """Subnormal, infinite, NaN and zero amaxes, with margins that make scales subnormal (faults.md 47)."""
    with np.errstate(all="ignore"):
        for margin in (-64, 0, 64):
            recipe = octavo.DelayedScaling(history=3, algorithm=algorithm, margin=margin)

            @jax.jit
            def step(state: ScalingHistory, amax: Any, recipe: octavo.DelayedScaling = recipe) -> ScalingHistory:
                state = octavo_jax.record_amax(state, amax)
                return octavo_jax.update_delayed(DelayedState(state, state, state), recipe).x

            state = ScalingHistory(jnp.zeros((3, 64), jnp.float32), jnp.ones(64, jnp.float32))
            expected = _definition(state)
            for _ in range(4):
                amax = (rng.integers(0, 0x7FA00000, 64) * (rng.random(64) < 0.8)).astype(np.uint32).view(np.float32)
                amax[rng.permutation(64)[:4]] = np.nan, np.nan, np.inf, 1e-40  # a draw of all bits is hardly ever these
                state = step(state, amax)
                expected = octavo_numerics.record_amax(expected, amax)
                expected = octavo_numerics.update_delayed(expected, "e4m3", algorithm=algorithm, margin=margin)
                assert _equal(state, expected)


def test_recording_in_a_function_that_is_differentiated(rng: np.random.Generator) -> None:
    """As in a quantized layer of somebody's own: the amax passes no gradient on, the state's is its new value."""
    state = octavo_jax.init_delayed(RECIPE, 1).x
    w, other = (
        jnp.asarray(rng.standard_normal(8), jnp.float32),
        jnp.abs(jnp.asarray(rng.standard_normal(1), jnp.float32)),
    )

    def loss(w: Any, state: ScalingHistory) -> Any:
        recorded = octavo_jax.record_amax(state, jnp.max(jnp.abs(w))[None])
        return jnp.sum(w), octavo_jax.record_amax(recorded, other)

    gradient, recorded = jax.grad(loss, has_aux=True)(w, state)
    assert (gradient == 1).all()
    assert recorded.history[0] == jnp.maximum(jnp.max(jnp.abs(w)), other)
    _, pull = jax.vjp(lambda state: loss(w, state)[1], state)
    (after,) = pull(state)
    assert jax.tree.all(jax.tree.map(jnp.array_equal, after, recorded))


def test_recording_in_shards_that_share_a_state(rng: np.random.Generator) -> None:
    """Inside `jax.shard_map`, the state's "gradient" has the largest amax of all, as a layer's has."""
    if len(jax.devices()) < 2:
        pytest.skip("this process has one device")
    mesh, state = jax.sharding.Mesh(jax.devices()[:2], "ranks"), octavo_jax.init_delayed(RECIPE, 1).x
    amax = jnp.abs(jnp.asarray(rng.standard_normal(2), jnp.float32))

    @partial(jax.shard_map, mesh=mesh, in_specs=(P(), P("ranks")), out_specs=P("ranks"))
    def shared(state: ScalingHistory, amax: Any) -> Any:
        return octavo_jax.record_amax(state, amax).scale

    after = jax.grad(lambda state: jnp.sum(shared(state, amax)))(state)
    assert _equal(after, octavo_numerics.record_amax(_definition(state), np.max(amax, keepdims=True)))


def test_calls_that_thread_the_state_take_a_maximum(rng: np.random.Generator) -> None:
    """Two calls in one differentiated function: the first state's gradient holds both calls' amaxes."""
    kernel, sizes = rng.standard_normal((G, K, N)).astype(np.float32), jnp.array([8, 8, 8])
    xs, dys = rng.standard_normal((2, M, K)).astype(np.float32), rng.standard_normal((2, M, N)).astype(np.float32)

    def loss(state: DelayedState) -> Any:
        total: Any = 0.0
        for x, dy in zip(xs, dys, strict=True):
            y, state = octavo_jax.grouped_dense(x, kernel, sizes, recipe=RECIPE, state=state)
            total = total + jnp.sum(y * dy)
        return total

    state = jax.jit(jax.grad(loss))(octavo_jax.init_delayed(RECIPE, G))
    for slot, values in ((state.x, xs), (state.grad, dys)):
        wanted = np.maximum(*(_amax(v, np.array([8, 8, 8])) for v in values))
        assert np.array_equal(slot.history[0], wanted)


def test_a_batch_that_shares_a_state_records_one_maximum(rng: np.random.Generator) -> None:
    """vmap of a layer with one state, and of that vmap, is the layer called in turn: JAX would add up the states, scale
    included."""
    kernel, sizes = rng.standard_normal((G, K, N)).astype(np.float32), jnp.array([8, 8, 8])
    xs, dys = rng.standard_normal((4, M, K)).astype(np.float32), rng.standard_normal((4, M, N)).astype(np.float32)

    def one(state: DelayedState, x: Any, dy: Any) -> tuple[Any, DelayedState]:
        y, state = octavo_jax.grouped_dense(x, kernel, sizes, recipe=RECIPE, state=state)
        return jnp.sum(y * dy), state

    def at_once(state: DelayedState) -> Any:
        return jnp.sum(jax.vmap(lambda x, dy: one(state, x, dy)[0])(jnp.asarray(xs), jnp.asarray(dys)))

    def nested(state: DelayedState) -> Any:
        batches = (jnp.asarray(a).reshape(2, 2, *a.shape[1:]) for a in (xs, dys))
        return jnp.sum(jax.vmap(jax.vmap(lambda x, dy: one(state, x, dy)[0]))(*batches))

    def in_turn(state: DelayedState) -> Any:
        def call(state: DelayedState, rows: Any) -> Any:
            loss, state = one(state, *rows)
            return state, loss

        return jnp.sum(jax.lax.scan(call, state, (xs, dys))[1])

    state = octavo_jax.init_delayed(RECIPE, G)
    steps = [jax.jit(jax.grad(function)) for function in (in_turn, at_once, nested)]
    for _ in range(2):  # in the second step, the first one's amaxes are in the history
        expected, *batched = (step(state) for step in steps)
        for made in batched:
            for (path, a), b in zip(jax.tree.leaves_with_path(made), jax.tree.leaves(expected), strict=True):
                assert np.array_equal(a, b), path
        state = octavo_jax.update_delayed(expected, RECIPE)


@pytest.mark.parametrize("way", ["vmap", "shard_map"])
def test_amaxes_are_reduced_over_named_axes(way: str) -> None:
    """A member without tokens takes part and gets the others' maximum, of states of their own (faults.md 54, 55)."""
    state = octavo_jax.init_delayed(RECIPE, 2)
    amax = jnp.array([[3.0, 0.0], [0.0, 0.0], [7.0, 2.0]])
    states = jax.tree.map(lambda leaf: jnp.stack([leaf] * len(amax)), state)

    def member(state: DelayedState, amax: Any) -> Any:
        slot = octavo_jax.record_amax(state.x, amax)
        return octavo_jax.update_delayed(DelayedState(slot, slot, slot), RECIPE, axis_name="ranks").x.history[-1]

    if way == "vmap":
        run = jax.vmap(member, axis_name="ranks")
    else:
        if jax.device_count() < len(amax):
            pytest.skip(f"fewer than {len(amax)} devices")
        mesh = jax.sharding.Mesh(jax.devices()[: len(amax)], "ranks")

        def shard(states: DelayedState, amaxes: Any) -> Any:
            return member(jax.tree.map(lambda leaf: leaf[0], states), amaxes[0])[None]

        run = jax.shard_map(shard, mesh=mesh, in_specs=P("ranks"), out_specs=P("ranks"))
    assert np.array_equal(jax.jit(run)(states, amax), [[7, 2]] * 3)


def test_a_quantizer_set_carries_the_state() -> None:
    """quantizer_set is a pytree with the state as leaves and specs static; it says when groups are missing."""
    quantizers = octavo_jax.quantizer_set(RECIPE, groups=G, checkpoint_name="mine")
    assert len(jax.tree.leaves(quantizers)) == 6
    doubled = jax.tree.map(lambda leaf: leaf * 2, quantizers)
    assert doubled.x.spec.checkpoint_name == "mine"
    assert np.array_equal(doubled.grad.state.scale, [2, 2, 2])
    q = doubled.x(jnp.ones((M, K)), jnp.array([8, 8, 8]))
    assert np.array_equal(q.rowwise_scale, [0.5, 0.5, 0.5])
    with pytest.raises(ValueError, match="groups is None"):
        octavo_jax.quantizer_set(RECIPE)
    assert octavo_jax.quantizer_set(octavo.recipe("bf16")).x is None


def _with_histories(state: DelayedState, change: Any) -> Any:
    return jax.tree.map(lambda leaf: change(leaf) if leaf.ndim == 2 else leaf, state)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda s: jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), s),
            r"state\.x\.\w+ has dtype bfloat16; .*cast",
        ),
        (lambda s: _with_histories(s, lambda h: h.astype(jnp.bfloat16)), r"state\.x\.history has dtype bfloat16"),
        (lambda s: _with_histories(s, lambda h: h.astype(jnp.int32)), r"state\.x\.history has dtype int32"),
        (lambda s: _with_histories(s, lambda h: h[:, :2]), r"history of shape \[4, 2\] and a scale of shape \[3\]"),
        (lambda s: _with_histories(s, lambda h: h[:, 0]), r"history of shape \[4\] and a scale of shape \[3\]"),
        (lambda s: DelayedState(s.x, None, s.grad), r"state\.kernel is a NoneType"),  # type: ignore[arg-type]
        (lambda s: vars(s), "state is a dict"),
    ],
)
def test_a_state_of_other_arrays_is_refused(change: Any, message: str) -> None:
    """Bits of a history that was cast with the parameters were read as those of float32: scales came out at random."""
    state = change(octavo_jax.init_delayed(RECIPE, G))
    x, kernel = jnp.ones((M, K)), jnp.ones((G, K, N))
    with pytest.raises(ValueError, match=message):
        octavo_jax.grouped_dense(x, kernel, [8, 0, 10], recipe=RECIPE, state=state)
    with pytest.raises(ValueError, match=message):
        octavo_jax.update_delayed(state, RECIPE)


@pytest.mark.parametrize("amax", [jnp.ones(G, jnp.bfloat16), jnp.ones(G, jnp.int32), jnp.ones(G + 1)])
def test_amaxes_are_one_float32_per_group(amax: Any) -> None:
    """Of others, bits were read as those of another number."""
    with pytest.raises(ValueError, match=r"amax has shape .*give one float32 per group, \[3\]"):
        octavo_jax.record_amax(octavo_jax.init_delayed(RECIPE, G).x, amax)

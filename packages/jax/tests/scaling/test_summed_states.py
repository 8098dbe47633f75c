"""Delayed states that JAX adds up are noticed, wherever the calls are, and no others are taken for sums."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

import octavo
import octavo_jax
from octavo_jax import DelayedState, ScalingHistory
from octavo_jax import linen as octavo_linen
from octavo_jax import nnx as octavo_nnx
from octavo_jax.linen import STATE_COLLECTION
from octavo_jax.linen import grouped as linen_grouped
from octavo_jax.nnx import grouped as nnx_grouped

M, K, G, H = 16, 8, 2, 4
SIZES = jnp.array([9, 5])
RECIPE = octavo.DelayedScaling(history=H)
SUMMED = "several calls in one differentiated function took one DelayedState"
XS = jnp.ones((3, M, K))


@jax.custom_vjp
def _call(x: Any, state: DelayedState) -> Any:
    """A layer in what concerns its state, without the arithmetic: quick to trace and to compile."""
    return jnp.sum(x) * jnp.sum(state.x.scale)


def _recorded(state: DelayedState, _: Any) -> Any:
    return None, jax.tree.map(lambda leaf: leaf.at[..., 0, :].set(3) if leaf.ndim == 2 else leaf, state)


_call.defvjp(lambda x, state: (_call(x, state), state), _recorded)


def _drawn(rng: np.random.Generator) -> DelayedState:
    """A state in the middle of training, with one group that has seen no token."""
    state = octavo_jax.init_delayed(RECIPE, G)
    drawn = jax.tree.map(lambda leaf: jnp.asarray(rng.uniform(0.5, 2, leaf.shape), jnp.float32), state)
    return jax.tree.map(lambda leaf, fresh: leaf.at[..., 1].set(fresh[..., 1]), drawn, state)


def _scanned(state: DelayedState) -> Any:
    return jax.lax.scan(lambda total, x: (total + _call(x, state), None), 0.0, XS)[0]


def _checkpointed(state: DelayedState) -> Any:
    layer = jax.checkpoint(_call)  # the second call of it is not traced again
    return layer(XS[0], state) + layer(XS[1], state)


def _in_vmaps(state: DelayedState) -> Any:
    layer = jax.vmap(_call, in_axes=(0, None))
    return jnp.sum(layer(XS, state)) + _call(XS[0], state)


SUMS: dict[str, Callable[[DelayedState], Any]] = {
    "two calls": lambda state: _call(XS[0], state) + _call(XS[1], state),
    "jax.checkpoint": _checkpointed,
    "jax.lax.scan": _scanned,
    "jax.vmap": _in_vmaps,
    "jax.jit": lambda state: jax.jit(_call)(XS[0], state) + jax.jit(_call)(XS[1], state),
}


@pytest.mark.parametrize("way", SUMS)
def test_a_sum_of_states_is_noticed(way: str, rng: np.random.Generator) -> None:
    """Each call has a trace of its own, or none because JAX remembers it, so that no call knows of another one. Under
    jit the state is NaN, since a device raises nothing; an eager gradient on a CPU is refused."""
    state = _drawn(rng)
    made = jax.jit(jax.grad(SUMS[way]))(state)
    for one in (made.x, made.kernel, made.grad):
        assert np.isnan(one.scale).all()
        assert np.isnan(one.history[0]).all()
    if jax.default_backend() == "cpu":
        with pytest.raises(ValueError, match=SUMMED):
            jax.grad(SUMS[way])(state)


@pytest.mark.usefixtures("on_a_cpu")
def test_a_sum_of_states_stays_loud() -> None:
    """A step that never leaves its jit trains with NaN at once, and the end of a step does not hide it; outside, layers
    and the update say what happened."""
    x, kernel = jnp.ones((M, K)), jnp.ones((G, K, K))

    def layer(state: DelayedState) -> Any:
        return octavo_jax.grouped_dense(x, kernel, SIZES, recipe=RECIPE, state=state, backend="jax-reference")[0]

    update = partial(octavo_jax.update_delayed, recipe=RECIPE)
    summed = jax.jit(jax.grad(SUMS["two calls"]))(octavo_jax.init_delayed(RECIPE, G))
    assert np.isnan(jax.jit(lambda state: layer(update(state)))(summed)[:14]).all()
    for use in (layer, update):
        with pytest.raises(ValueError, match=rf"state\.x\.scale holds NaN: {SUMMED}"):
            use(summed)


def _branches(state: DelayedState) -> Any:
    first = jax.lax.cond(XS[0, 0, 0] > 0, lambda: _call(XS[0], state), lambda: 0.0)
    return first + jax.lax.cond(XS[0, 0, 0] > 0, lambda: 0.0, lambda: _call(XS[1], state))


def _of_layers(state: DelayedState) -> Any:
    stacked = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), state)
    made = jax.grad(
        lambda stacked: sum(_call(XS[i], jax.tree.map(lambda leaf: leaf[i], stacked)) for i in range(2))  # noqa: B023
    )(stacked)
    return jax.tree.map(lambda leaf: leaf[1], made)


def _pullbacks(state: DelayedState) -> Any:
    (_, pull), (_, other) = jax.vjp(_scanned_in_turn, state), jax.vjp(partial(_call, XS[1]), state)
    return jax.tree.map(jnp.maximum, pull(1.0)[0], other(1.0)[0])


def _scanned_in_turn(state: DelayedState) -> Any:
    """A scan that stacked states are cut up for."""
    stacked = jax.tree.map(lambda leaf: leaf[None], state)
    return jax.lax.scan(lambda total, one: (total + _call(XS[0], one), None), 0.0, stacked)[0]


RIGHT: dict[str, Callable[[DelayedState], Any]] = {
    "one call": jax.grad(partial(_call, XS[0])),
    "two branches of which one runs": jax.grad(_branches),
    "layers of a stack": _of_layers,
    "two pullbacks": _pullbacks,
    "one state for two arguments": lambda state: jax.grad(lambda a, b: _call(XS[0], a) + _call(XS[1], b))(state, state),
    "a second call without a derivative": jax.grad(
        lambda state: _call(XS[0], state) + _call(XS[1], jax.lax.stop_gradient(state))
    ),
    "a second call beside the loss": lambda state: jax.grad(
        lambda state: (_call(XS[0], state), _call(XS[1], state)), has_aux=True
    )(state)[0],
    "a gradient of each example": lambda state: jax.tree.map(
        lambda leaf: leaf[2], jax.vmap(jax.grad(_call, argnums=1), in_axes=(0, None))(XS, state)
    ),
    "remembered": jax.grad(jax.checkpoint(jax.jit(partial(_call, XS[0])))),
}


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("way", RIGHT)
def test_a_state_that_one_call_recorded_is_none(way: str, jit: bool, rng: np.random.Generator) -> None:
    """It comes back bit for bit: several uses of which JAX adds up one alone are right."""
    state = _drawn(rng)
    made = (jax.jit(RIGHT[way]) if jit else RIGHT[way])(state)
    wanted = _recorded(state, None)[1]
    for (path, a), b in zip(jax.tree.leaves_with_path(made), jax.tree.leaves(wanted), strict=True):
        assert np.array_equal(a, b), path


@pytest.mark.parametrize("jit", [False, True])
def test_a_state_whose_call_did_not_run_is_the_one_before(jit: bool, rng: np.random.Generator) -> None:
    """JAX's gradient of it is 0, which was once a state with scale 0: the next step was NaN. Other layers of a stack
    and other groups keep theirs."""

    def skipped(state: DelayedState) -> Any:
        return jax.lax.cond(XS[0, 0, 0] < 0, lambda: _call(XS[0], state), lambda: 0.0)

    def second_of_a_stack(stacked: DelayedState) -> Any:
        return _call(XS[0], jax.tree.map(lambda leaf: leaf[1], stacked))

    state = _drawn(rng)
    stacked = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), state)
    of_both = jax.tree.map(lambda *leaves: jnp.stack(leaves), state, _recorded(state, None)[1])
    for function, given, wanted in ((skipped, state, state), (second_of_a_stack, stacked, of_both)):
        made = (jax.jit(jax.grad(function)) if jit else jax.grad(function))(given)
        for (path, a), b in zip(jax.tree.leaves_with_path(made), jax.tree.leaves(wanted), strict=True):
            assert np.array_equal(a, b), path


@pytest.mark.usefixtures("on_a_cpu")
def test_a_state_that_nothing_uses_is_refused() -> None:
    """Of what a function does not use at all JAX's gradient is zeros, which are no state: layers and the update say so,
    and under jit the update leaves NaN."""
    x, kernel = jnp.ones((M, K)), jnp.ones((G, K, K))
    unused = jax.grad(lambda state: 0.0)(octavo_jax.init_delayed(RECIPE, G))
    for use in (
        partial(octavo_jax.update_delayed, recipe=RECIPE),
        lambda state: octavo_jax.grouped_dense(x, kernel, SIZES, recipe=RECIPE, state=state, backend="jax-reference"),
    ):
        with pytest.raises(ValueError, match=r"state\.x\.scale holds 0, .* no call .* keep the state from before"):
            use(unused)
    updated = jax.jit(partial(octavo_jax.update_delayed, recipe=RECIPE))(unused)
    assert all(np.isnan(one.scale).all() for one in (updated.x, updated.kernel, updated.grad))


def test_other_derivatives_of_a_state_are_taken_as_ever() -> None:
    """Forward mode has no rule of ours in its way where no layer is called."""
    state = octavo_jax.init_delayed(RECIPE, G)
    function: Any = lambda state: 3 * state.x.scale  # noqa: E731
    assert np.array_equal(jax.jvp(function, (state,), (state,))[1], [3, 3])
    assert np.array_equal(jax.linearize(function, state)[1](state), [3, 3])


@pytest.mark.parametrize("algorithm", ["max", "most_recent"])
def test_a_rule_that_updates_the_state_is_none(algorithm: Any, rng: np.random.Generator) -> None:
    """Somebody's own rule of differentiation may end the step by itself: a scale that doubles then is no sum. Amaxes
    here are powers of two, so that scales double often, and the history of two steps with them."""
    recipe = octavo.DelayedScaling(history=2, algorithm=algorithm)

    @jax.custom_vjp
    def ended(state: DelayedState, amax: Any) -> Any:
        return jnp.sum(amax)

    def after(saved: Any, _: Any) -> Any:
        state, amax = saved
        slots = (octavo_jax.record_amax(one, amax) for one in (state.x, state.kernel, state.grad))
        return octavo_jax.update_delayed(DelayedState(*slots), recipe), None

    ended.defvjp(lambda state, amax: (jnp.sum(amax), (state, amax)), after)
    state, step = octavo_jax.init_delayed(recipe, 64), jax.jit(jax.grad(ended))
    doubled = 0
    for _ in range(8):
        amax = np.float32(2) ** rng.integers(-2, 3, 64) * (rng.random(64) < 0.8)
        before, state = state, step(state, jnp.asarray(amax, jnp.float32))
        doubled += int(np.sum(np.asarray(state.x.scale) == 2 * np.asarray(before.x.scale)))
        assert not any(np.isnan(leaf).any() for leaf in jax.tree.leaves(state))
    assert doubled > 0


def test_states_of_any_magnitude(rng: np.random.Generator) -> None:
    """Two to nine states that were added in any order are a sum however it was rounded, past the largest number, too;
    one is none, and infinite amaxes among finished steps make none of it."""
    groups = 256
    exponents = rng.integers(-100, 128, (2, groups))
    scale = np.float32(2) ** exponents[0] * rng.uniform(1, 1.99, groups).astype(np.float32)
    steps = np.float32(2) ** rng.integers(-100, 128, (H, groups)) * rng.uniform(1, 1.99, (H, groups))
    steps = np.where(rng.random((H, groups)) < 0.3, 0, np.where(rng.random((H, groups)) < 0.1, np.inf, steps))
    one = ScalingHistory(jnp.asarray(steps, jnp.float32), jnp.asarray(scale))
    state = DelayedState(one, one, one)

    def gradient(uses: int) -> Any:
        return jax.jit(jax.grad(lambda state: sum(_call(XS[0], state) for _ in range(uses))))(state)

    for uses in (2, 3, 9):
        assert np.isnan(gradient(uses).x.scale).all()
    assert np.array_equal(gradient(1).x.scale, scale)


def _module() -> Any:
    return octavo_nnx.GroupedLinear(G, K, K, recipe=RECIPE, backend="jax-reference", rngs=nnx.Rngs(0))


def _loss(module: Any, x: Any) -> Any:
    return jnp.sum(module(x, SIZES))


def _nnx_state(function: Callable[[Any], Any]) -> DelayedState:
    wrt = nnx.DiffState(0, nnx.Any(nnx.Param, octavo_nnx.ScalingState))
    state: DelayedState = nnx.jit(nnx.grad(function, argnums=wrt))(_module())["delayed"].get_value()
    return state


def _nnx_checkpoint(module: Any) -> Any:
    layer = jax.checkpoint(_loss)
    return layer(module, XS[0]) + layer(module, XS[1])


def _nnx_scan(module: Any) -> Any:
    body = nnx.scan(lambda module, total, x: total + _loss(module, x), in_axes=(None, nnx.Carry, 0), out_axes=nnx.Carry)
    return body(module, 0.0, XS)


class _Shared(nn.Module):
    """A layer under nn.remat that is called twice."""

    @nn.compact
    def __call__(self, x: Any) -> Any:
        layer = nn.remat(octavo_linen.GroupedDense)(G, K, recipe=RECIPE, backend="jax-reference")
        return layer(x, SIZES) + layer(2 * x, SIZES)


class _Body(nn.Module):
    """A layer whose state a scan shares."""

    @nn.compact
    def __call__(self, total: Any, x: Any) -> Any:
        layer = octavo_linen.GroupedDense(G, K, recipe=RECIPE, backend="jax-reference")
        return total + layer(x, SIZES), None


def _scan(**variables: Any) -> Any:
    return nn.scan(_Body, split_rngs={"params": False}, **variables)()


BROADCAST = _scan(variable_broadcast=("params", STATE_COLLECTION))


def _linen_state(module: Any, arguments: tuple[Any, ...], mutable: Any = False, initial: Any = None) -> DelayedState:
    @jax.jit
    def gradient() -> Any:
        variables = (initial or module).init(jax.random.key(0), *arguments)

        def loss(state: Any) -> Any:
            result = module.apply({**variables, STATE_COLLECTION: state}, *arguments, mutable=mutable)
            return jnp.sum(jax.tree.leaves(result)[0])

        return jax.grad(loss)(variables[STATE_COLLECTION])

    (state,) = jax.tree.leaves(gradient(), is_leaf=lambda leaf: isinstance(leaf, DelayedState))
    assert isinstance(state, DelayedState)
    return state


MODULES: dict[str, Callable[[], DelayedState]] = {
    "nnx, jax.checkpoint": lambda: _nnx_state(_nnx_checkpoint),
    "nnx.scan, in_axes=None": lambda: _nnx_state(_nnx_scan),
    "linen, nn.remat": lambda: _linen_state(_Shared(), (XS[0],)),
    "linen, nn.scan": lambda: _linen_state(BROADCAST, (jnp.zeros((M, K)), XS)),
}
THREADED: dict[str, Callable[[], DelayedState]] = {
    "nnx, jax.checkpoint of one call": lambda: _nnx_state(lambda module: jax.checkpoint(_loss)(module, XS[0])),
    "linen, nn.remat": lambda: _linen_state(_Shared(), (XS[0],), [STATE_COLLECTION]),
    "linen, nn.scan": lambda: _linen_state(
        _scan(variable_broadcast="params", variable_carry=STATE_COLLECTION),
        (jnp.zeros((M, K)), XS),
        [STATE_COLLECTION],
        BROADCAST,  # nn.scan makes no variables that it carries
    ),
}


@pytest.fixture
def _quick_modules(way: str, recording_layer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The layer itself in one way that adds up its states, and in one that threads them; else what JAX and Flax do to
    a state is asked without its arithmetic."""
    if way not in ("nnx, jax.checkpoint", "nnx, jax.checkpoint of one call"):
        for module in (linen_grouped, nnx_grouped):
            monkeypatch.setattr(module, "grouped_dense", recording_layer)


@pytest.mark.usefixtures("_quick_modules")
@pytest.mark.parametrize("way", MODULES)
def test_modules_whose_states_are_added_up_are_noticed(way: str) -> None:
    """What modules record inside of these is discarded, or each call is in a trace of its own: scales doubled, and
    nothing said so."""
    assert np.isnan(MODULES[way]().x.scale).all()


@pytest.mark.usefixtures("_quick_modules")
@pytest.mark.parametrize("way", THREADED)
def test_modules_that_thread_their_states_are_none(way: str) -> None:
    """The same transformations as the guide says to write them."""
    state = THREADED[way]()
    assert np.array_equal(state.x.scale, [1, 1])
    assert np.array_equal(state.x.history[0], [2, 2] if way == "linen, nn.remat" else [1, 1])

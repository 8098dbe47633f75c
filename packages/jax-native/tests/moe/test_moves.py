"""A router's choices, their order, and rows that move with them, by the kernels: what JAX's operations say, where one
device holds the arrays."""

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
import octavo_numerics
from octavo.router import RouterRule
from octavo_jax import moe

T, E, K, C = 37, 24, 3, 40
KERNELS, XLA = "jax-native", "jax-reference"
TARGETS = ("octavo_choose", "octavo_choose_gradient", "octavo_route", "octavo_combine_rows", "octavo_dot_rows")


def _mesh(devices: int, kind: Any = AxisType.Auto) -> Any:
    return jax.make_mesh((devices,), ("tokens",), axis_types=(kind,), devices=jax.devices()[:devices])


@pytest.fixture
def one_device() -> Any:
    """A mesh of one: the tests' process sees several devices, of which XLA might cut arrays over all."""
    with jax.set_mesh(_mesh(1)):
        yield


def _calls(run: Any, *arrays: Any) -> set[str]:
    text = jax.jit(run).lower(*arrays).as_text()
    return {name for name in (*TARGETS, "octavo_permute_rows") if f"@{name}(" in text}


def _draw_choices(rng: np.random.Generator) -> Any:
    """Some are nobody's."""
    return jnp.asarray(rng.integers(-2, E + 2, (T, K)), jnp.int32)


@pytest.mark.usefixtures("one_device")
@pytest.mark.parametrize("rows", [None, 60])
def test_choices_are_sorted_alike(rows: int | None, rng: np.random.Generator) -> None:
    """Sizes, order, positions and weights are equal number for number, with tokens masked and rows limited."""
    choices, weights = _draw_choices(rng), jnp.asarray(rng.random((T, K)), jnp.float32)
    mask = jnp.asarray(rng.random(T) < 0.8)
    arranged = partial(moe.arrange, choices, weights, E, mask=mask, rows=rows)
    mine, wanted = arranged(backend=KERNELS), arranged(backend=XLA)
    for name in ("group_sizes", "order", "position", "weights"):
        one, other = getattr(mine, name), getattr(wanted, name)
        assert one.dtype == other.dtype, name
        np.testing.assert_array_equal(one, other, name)
    assert _calls(lambda c: moe.arrange(c, weights, E), choices) == {"octavo_route"}


RULES = {
    "softmax": RouterRule(K),
    "sigmoid": RouterRule(K, "sigmoid", renormalize=False, scale=2.5),
    "groups": RouterRule(K, "sqrtsoftplus", 6, 2),
}


@pytest.mark.usefixtures("one_device")
@pytest.mark.parametrize("way", ["logits", "bias", "replay"])
@pytest.mark.parametrize("name", RULES)
def test_a_router_is_its_definition(name: str, way: str, rng: np.random.Generator) -> None:
    """Choices and counts are equal, weights and the gradient of logits within their bounds. Logits and biases are steps
    of which no two sums are near."""
    rule = RULES[name]
    steps = np.stack([rng.permutation(E) for _ in range(T)]) / 8
    logits, dweights = steps.astype(np.float32), rng.standard_normal((T, K)).astype(np.float32)
    bias = (np.arange(E) % 3).astype(np.float32) if way == "bias" else None
    replay = rng.integers(-1, E + 1, (T, K)) if way == "replay" else None
    fields: dict[str, Any] = {part: getattr(rule, part) for part in ("score", "groups", "kept_groups")}
    fields |= {"renormalize": rule.renormalize, "scale": rule.scale, "backend": KERNELS}
    fields |= {"bias": None if bias is None else jnp.asarray(bias)}
    fields |= {"replay": None if replay is None else jnp.asarray(replay)}

    def choose(logits: Any) -> Any:
        made = octavo_jax.choose_experts(logits, rule.k, **fields)
        return made.weights, (made.choices, made.counts)

    (weights, (choices, counts)), pull = jax.vjp(choose, jnp.asarray(logits))
    zeros = tuple(np.zeros(a.shape, jax.dtypes.float0) for a in (choices, counts))
    (dlogits,) = pull((jnp.asarray(dweights), zeros))
    expected = octavo_numerics.choose_experts(logits, rule, bias, replay)
    np.testing.assert_array_equal(choices, expected.choices)
    np.testing.assert_array_equal(counts, expected.counts)
    bound = octavo_numerics.choice_weights_bound(logits, expected, rule)
    assert (np.abs(np.asarray(weights) - expected.weights) <= bound).all()
    given = logits, expected.choices, dweights
    wanted, allowed = octavo_numerics.choose_gradient(*given, rule), octavo_numerics.choose_gradient_bound(*given, rule)
    assert (np.abs(np.asarray(dlogits) - wanted) <= allowed * (1 + 2.0**-24) + np.abs(wanted) * 2.0**-24).all()
    assert _calls(lambda given: choose(given)[0], jnp.asarray(logits)) == {"octavo_choose"}


@pytest.mark.usefixtures("one_device")
def test_weights_are_differentiated_once_in_reverse(rng: np.random.Generator) -> None:
    """Other derivatives are refused, not wrong; JAX's operations have them where they are asked for by name."""
    logits = jnp.asarray(rng.standard_normal((T, E)), jnp.float32)

    def loss(logits: Any, backend: str) -> Any:
        return jnp.sum(octavo_jax.choose_experts(logits, K, score="sigmoid", backend=backend).weights ** 2)

    for twice in (lambda run: jax.jvp(run, (logits,), (logits,)), lambda run: jax.hessian(run)(logits)):
        with pytest.raises((TypeError, ValueError, NotImplementedError)):
            twice(partial(loss, backend=KERNELS))
        made = jax.jit(lambda twice=twice: twice(partial(loss, backend=XLA)))()
        assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(made))


@pytest.mark.usefixtures("one_device")
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("rows", [None, 60])
def test_rows_move_as_by_jax(dtype: Any, rows: int | None, rng: np.random.Generator) -> None:
    """Sums by token and weighted rows have the bits of fp32 sums in the order of choices; the gradients of weights are
    within the bound of a sum. NaN past the sum of the sizes stays there."""
    weights = jnp.asarray(rng.random((T, K)), jnp.float32)
    routing = moe.arrange(_draw_choices(rng), weights, E, rows=rows)
    total, count = int(routing.group_sizes.sum()), len(routing.order)
    given = rng.standard_normal((count, C)).astype(np.float32)
    given[total:] = np.nan
    results, dy = jnp.asarray(given, dtype), jnp.asarray(rng.standard_normal((T, C)), dtype)
    position, inside = np.asarray(routing.position), np.asarray(routing.position) < total
    wide = np.asarray(results).astype(np.float32)[np.minimum(position, count - 1)]

    def combine(results: Any, weights: Any, backend: str) -> Any:
        of = moe.Routing(routing.group_sizes, routing.order, routing.position, weights)
        return moe.combine(results, of, backend=backend)

    y, pull = jax.vjp(partial(combine, backend=KERNELS), results, weights)
    expected = np.zeros((T, C), np.float32)
    for j in range(K):
        expected += np.where(inside[:, j, None], np.asarray(weights)[:, j, None] * wide[:, j], np.float32(0))
    np.testing.assert_array_equal(np.asarray(y), expected.astype(np.asarray(y).dtype))
    drows, dweights = pull(dy)
    wanted, _ = jax.vjp(partial(combine, backend=XLA), results, weights)[1](dy)
    np.testing.assert_array_equal(np.asarray(drows)[:total], np.asarray(wanted)[:total])
    terms = wide.astype(np.float64) * np.asarray(dy).astype(np.float64)[:, None]
    error = np.abs(np.asarray(dweights) - np.where(inside, terms.sum(-1), 0))
    assert (error[inside] <= ((C + 2) * 2.0**-24 * np.abs(terms).sum(-1))[inside]).all()
    assert not error[~inside].any()
    summed = _calls(partial(moe.combine, routing=routing, weighted=False), results)
    assert summed == {"octavo_combine_rows"}
    calls = _calls(lambda *a: jax.vjp(partial(combine, backend=KERNELS), *a)[1](dy), results, weights)
    assert ("octavo_dot_rows" in calls) == (rows is None)  # a limit leaves rows that no choice writes


def _block(x: Any, router: Any, wi: Any, wo: Any, **how: Any) -> Any:
    return moe.moe_mlp(x, router, wi, wo, k=K, recipe=octavo.HighPrecision(), **how)[0]


def _arrays(rng: np.random.Generator) -> tuple[Any, ...]:
    shapes = ((T * 8, C), (C, E), (E, C, 64), (E, 32, C))
    return tuple(jnp.asarray(rng.standard_normal(shape) / 4, jnp.bfloat16) for shape in shapes)


def _step(x: Any, *parameters: Any, **how: Any) -> Any:
    y, pull = jax.vjp(partial(_block, **how), x, *parameters)
    return y, pull(y)


@pytest.mark.usefixtures("one_device")
@pytest.mark.parametrize("weights_on", ["output", "activation"])
def test_a_block_is_its_parts(weights_on: Any, rng: np.random.Generator) -> None:
    """`moe_mlp` has the bits of route, permute, grouped_mlp and combine, which find the same kernels; and is near what
    JAX's operations make of all that is not a product."""
    x, router, wi, wo = _arrays(rng)

    def parts(x: Any, router: Any, wi: Any, wo: Any) -> Any:
        routing = moe.route(jnp.matmul(x, router, preferred_element_type=jnp.float32), K)
        probs = None if weights_on == "output" else moe.row_weights(routing)
        how: dict[str, Any] = {"recipe": octavo.HighPrecision(), "probs": probs}
        rows = octavo_jax.grouped_mlp(moe.permute(x, routing), wi, wo, routing.group_sizes, **how)
        return moe.combine(rows, routing, weighted=probs is None)

    block = partial(_block, weights_on=weights_on)
    np.testing.assert_array_equal(jax.jit(block)(x, router, wi, wo), jax.jit(parts)(x, router, wi, wo))
    step = partial(_step, weights_on=weights_on)
    written = {"octavo_dot_rows", "octavo_permute_rows"} if weights_on == "output" else set()
    assert _calls(step, x, router, wi, wo) == {*TARGETS[:4], *written}
    assert _calls(partial(step, backend=XLA), x, router, wi, wo) == set()
    wanted = jax.jit(partial(step, backend=XLA))(x, router, wi, wo)
    for mine, other in zip(jax.tree.leaves(jax.jit(step)(x, router, wi, wo)), jax.tree.leaves(wanted), strict=True):
        one, two = np.asarray(mine, np.float32), np.asarray(other, np.float32)
        assert np.linalg.norm(one - two) <= 2.0**-6 * np.linalg.norm(two)  # a few roundings to bf16


@pytest.mark.usefixtures("one_device")
@pytest.mark.parametrize("name", RULES)
def test_a_block_chooses_by_any_rule(name: str, rng: np.random.Generator) -> None:
    """By the kernels: y is that of `choose_experts` and `routed_mlp`, bit for bit, with a bias for choosing."""
    x, router, wi, wo = _arrays(rng)
    rule, bias = RULES[name], jnp.asarray(rng.standard_normal(E), jnp.float32)
    how: dict[str, Any] = {part: getattr(rule, part) for part in ("score", "groups", "kept_groups", "scale")}
    how |= {"k": K, "renormalize": rule.renormalize}

    def parts(x: Any, router: Any, wi: Any, wo: Any) -> Any:
        logits = jnp.matmul(x, router, preferred_element_type=jnp.float32)
        choice = octavo_jax.choose_experts(logits, bias=bias, **how)
        routing = moe.arrange(choice.choices, choice.weights, E)
        return moe.routed_mlp(x, routing, wi, wo, recipe=octavo.HighPrecision())

    def block(x: Any, router: Any, wi: Any, wo: Any) -> Any:
        return moe.moe_mlp(x, router, wi, wo, recipe=octavo.HighPrecision(), choice_bias=bias, **how)[0]

    assert "octavo_choose" in _calls(block, x, router, wi, wo)
    np.testing.assert_array_equal(jax.jit(block)(x, router, wi, wo), jax.jit(parts)(x, router, wi, wo))


def test_where_several_devices_may_hold_parts(rng: np.random.Generator) -> None:
    """XLA cuts its own operations under an Auto mesh, and where nothing says that there is one device; inside of
    shard_map each device calls the kernels, and y has the same bits."""
    x, router, wi, wo = _arrays(rng)
    mesh = _mesh(8)
    local = jax.shard_map(
        _block, mesh=mesh, in_specs=(P("tokens"), P(), P(), P()), out_specs=P("tokens"), check_vma=False
    )
    with jax.set_mesh(mesh):
        assert _calls(_block, x, router, wi, wo) == set()
        assert _calls(local, x, router, wi, wo) == {"octavo_choose", "octavo_route", "octavo_combine_rows"}
        spread = np.asarray(jax.jit(local)(x, router, wi, wo))
    assert _calls(_block, x, router, wi, wo) == set()
    with jax.set_mesh(_mesh(1)):
        np.testing.assert_array_equal(spread, jax.jit(_block)(x, router, wi, wo))


@pytest.mark.usefixtures("one_device")
def test_vmap_is_a_loop(rng: np.random.Generator) -> None:
    """Of the whole block and its gradients."""
    x, router, wi, wo = _arrays(rng)
    both = jnp.stack([x, x[::-1]])
    mapped = jax.vmap(_step, in_axes=(0, None, None, None))(both, router, wi, wo)
    for number, one in enumerate(both):
        for leaf, wanted in zip(jax.tree.leaves(mapped), jax.tree.leaves(_step(one, router, wi, wo)), strict=True):
            np.testing.assert_array_equal(leaf[number], wanted)


@pytest.mark.usefixtures("one_device")
def test_explain_says_who_moves_rows(rng: np.random.Generator) -> None:
    """By name, with the reason of the rest."""
    arrays = _arrays(rng)
    told = dict(moe.explain(*arrays, k=K, recipe=octavo.HighPrecision()).tokens)
    assert told["experts"] == f"{KERNELS} chooses"
    assert told["choices"] == f"{KERNELS} sorts them"
    assert told["y and dx"] == f"{KERNELS} sums rows by token"
    assert "dy times weights" not in told
    weighed = moe.explain(*arrays, k=K, recipe=octavo.HighPrecision(), weights_on="output")
    assert dict(weighed.tokens)["dy times weights"] == f"{KERNELS} writes its rows"
    told = dict(moe.explain(*arrays, k=K, recipe=octavo.HighPrecision(), backend=XLA).tokens)
    assert told["experts"] == "XLA chooses"
    assert told["choices"] == "XLA sorts them"


@pytest.mark.usefixtures("one_device")
def test_arrays_of_numpy_are_taken(rng: np.random.Generator) -> None:
    """Without jit, as JAX's own operations take them: a router, its routing, and rows that move."""
    x, logits, weights = (rng.random((T, columns), np.float32) for columns in (C, E, K))

    def parts(x: Any, logits: Any, weights: Any, replay: Any) -> Any:
        routing = moe.route(logits, K, backend=KERNELS)
        rows = moe.permute(x, routing, backend=KERNELS)
        again = octavo_jax.choose_experts(logits, K, replay=replay, backend=KERNELS)
        arranged = moe.arrange(replay, weights, E, backend=KERNELS)
        mine = moe.combine(np.asarray(rows) if isinstance(x, np.ndarray) else rows, arranged, backend=KERNELS)
        return routing, rows, again, mine

    given = (x, logits, weights, rng.integers(0, E, (T, K), np.int32))
    for mine, wanted in zip(
        jax.tree.leaves(parts(*given)), jax.tree.leaves(parts(*map(jnp.asarray, given))), strict=True
    ):
        np.testing.assert_array_equal(mine, wanted)

"""The router against its definition: choices, weights, counts and losses; differentiated, mapped, sharded, replayed."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import octavo_numerics
from octavo_jax import choose_experts, router_losses
from octavo_jax.policies import save_quantized

T, E, C = 24, 12, 3
FP32 = 2**-20
"""Sixteen units of fp32: sums of at most E = 12 scores, a quotient, and functions that are right to a unit or two."""
RULES: dict[str, dict[str, Any]] = {
    "softmax": {},
    "softmax, as it is": {"renormalize": False},
    "sigmoid in groups": {"score": "sigmoid", "groups": 4, "kept_groups": 2, "scale": 2.5},
    "sqrtsoftplus": {"score": "sqrtsoftplus"},
}


def _logits(rng: np.random.Generator) -> np.ndarray:
    """Steps of a quarter from zero: they tie often, their scores are equal in any arithmetic, and no two sums of scores
    tie by an identity that rounding breaks, such as sigmoid(x) + sigmoid(-x) = 1."""
    return (rng.integers(0, 17, (T, E)) / 4).astype(np.float32)


def _slope(function: Any, point: np.ndarray, direction: np.ndarray) -> float:
    return (function(point + 1e-6 * direction) - function(point - 1e-6 * direction)) / 2e-6


@pytest.mark.parametrize("name", RULES)
def test_router_is_its_definition(name: str, rng: np.random.Generator) -> None:
    """Choices, ties to the lower index, weights, counts, losses, replayed choices; gradients are the definition's
    slopes along a random direction, off by FP32 of the addends and 1e-8 of them for the central differences."""
    rule = octavo_numerics.RouterRule(C, **RULES[name])
    score = rule.score
    logits = _logits(rng)
    # One bias for a group's experts: (a + 1) + b and a + (b + 1) are rounded apart.
    bias = np.repeat(rng.integers(-2, 3, 4) / 4, E // 4).astype(np.float32) if rule.groups > 1 else None
    replay = np.stack([rng.permutation(E)[:C] for _ in range(T)]).astype(np.int32)
    replay[3, 1] = -1
    dweights, direction = rng.standard_normal((T, C)), rng.standard_normal((T, E))
    run = partial(choose_experts, k=C, **RULES[name])
    losses_of = jax.jit(partial(router_losses, score=score, sequences=4))
    for given in (None, replay):
        made = jax.jit(run)(logits, bias=bias, replay=given)
        wanted = octavo_numerics.choose_experts(logits, rule, bias, given)
        assert np.array_equal(made.choices, wanted.choices)
        assert np.array_equal(made.counts, wanted.counts)
        np.testing.assert_allclose(made.weights, wanted.weights, rtol=FP32)
        losses = losses_of(logits, made.choices)._asdict()
        expected = octavo_numerics.router_losses(logits, wanted, score, sequences=4)
        for loss, value in losses.items():
            np.testing.assert_allclose(value, expected[loss], rtol=FP32)

        def objective(logits: Any, chosen: Any) -> Any:
            return jnp.sum(run(logits, replay=chosen).weights * dweights) + sum(losses_of(logits, chosen))

        def defined(logits: np.ndarray, chosen: Any = wanted.choices) -> float:
            choice = octavo_numerics.choose_experts(logits, rule, None, chosen)
            losses = octavo_numerics.router_losses(logits, choice, score, sequences=4)
            return float((choice.weights * dweights).sum()) + sum(losses.values())

        gradient = np.asarray(jax.jit(jax.grad(objective))(logits, made.choices), np.float64)
        moved = gradient * direction
        addends = np.abs(wanted.weights * dweights).sum() + sum(expected.values()) + np.abs(moved).sum()
        slope = _slope(defined, logits.astype(np.float64), direction)
        assert abs((gradient * direction).sum() - slope) <= (FP32 + 1e-8) * (
            addends + np.abs(gradient * direction).sum()
        )


def test_groups_are_kept_by_their_two_largest_scores(rng: np.random.Generator) -> None:
    """Two good experts (0.88 each) are worth more than the best one and a middling one (0.98 and 0.5)."""
    of_groups = np.array([[4.0, 0.0, 0.0], [2.0, 2.0, 0.0], [0.0, 0.0, 0.0], [1.0, 1.0, 1.0]])
    logits = rng.permuted(np.stack([rng.permutation(of_groups) for _ in range(T)]), axis=2).reshape(T, E)
    choose = jax.jit(partial(choose_experts, k=2, score="sigmoid", groups=4, kept_groups=1))
    made = choose(jnp.asarray(logits, jnp.float32))
    assert made.choices.tolist() == [np.flatnonzero(row == 2.0).tolist() for row in logits]


def test_every_way_of_running_gives_the_same_choices(rng: np.random.Generator) -> None:
    """Under jit and vmap the same bits of choices; a policy of jax.checkpoint that saves them does not search again."""
    logits = _logits(rng)
    run = partial(choose_experts, k=C, score="sigmoid", groups=4, kept_groups=2, backend="jax-reference")
    plain = run(logits)

    @jax.jit
    def others(logits: Any) -> Any:
        parts = jax.vmap(run)(logits.reshape(4, -1, E))
        return run(logits), parts.choices.reshape(T, C), jnp.sum(parts.counts, axis=0)

    whole, parts, counts = others(logits)
    for choices in (whole.choices, parts):
        assert np.array_equal(choices, plain.choices)
    assert np.array_equal(counts, plain.counts)

    def searches(policy: Any) -> int:
        loss = jax.checkpoint(lambda logits: jnp.sum(jnp.sin(run(logits).weights)), policy=policy)
        return str(jax.make_jaxpr(jax.grad(loss))(logits)).count(" top_k[")

    assert searches(save_quantized()) == 3 == searches(None) // 2


def test_extreme_logits_have_gradients() -> None:
    """Scores of logits far below 0 underflow to 0: their gradients are 0 and not NaN, and no token is all that no
    token has."""
    logits = jnp.array([[-200.0, -88.0, 90.0], [-1e4, -1e4, -1e4], [-jnp.inf, 0, 1]], jnp.float32)
    for score in ("softmax", "sigmoid", "sqrtsoftplus"):
        gradient = jax.jit(jax.grad(lambda x, s=score: choose_experts(x, 2, score=s).weights[:, 0].sum()))
        assert np.isfinite(gradient(logits)).all()

    @jax.jit
    def of_no_token() -> Any:
        nothing = choose_experts(jnp.zeros((0, 3)), 2)
        return nothing, router_losses(jnp.zeros((0, 3)), nothing.choices, sequences=4)

    nothing, losses = of_no_token()
    assert nothing.choices.shape == (0, 2)
    assert not nothing.counts.any()
    assert not any(losses)


def test_roots_of_softplus_that_underflow_weigh_as_defined(rng: np.random.Generator) -> None:
    """Down to a logit of -174, where fp32 holds no softplus but its root: a token whose logits were all below -87
    once weighed 0, and its experts' results were gone. Below, the weights are 0 and finite, as is their gradient."""
    logits = (rng.uniform(-190, -10, (T, 1)) - 4 * rng.random((T, E))).astype(np.float32)
    logits[:3] -= [[150.0], [1e30], [np.inf]]
    rule, dweights = octavo_numerics.RouterRule(C, "sqrtsoftplus"), rng.uniform(-1, 1, (T, C)).astype(np.float32)

    @jax.jit
    def run(logits: Any) -> Any:
        choose = lambda logits: choose_experts(logits, C, score="sqrtsoftplus", backend="jax-reference")  # noqa: E731
        weights, pull = jax.vjp(lambda logits: choose(logits).weights, logits)
        return choose(logits).choices, weights, pull(dweights)[0]

    choices, weights, gradient = run(logits)
    wanted = octavo_numerics.choose_experts(logits, rule)
    assert np.array_equal(choices, wanted.choices)
    assert (np.abs(weights - wanted.weights) <= octavo_numerics.choice_weights_bound(logits, wanted, rule)).all()
    defined = octavo_numerics.choose_gradient(logits, wanted.choices, dweights, rule)
    bound = octavo_numerics.choose_gradient_bound(logits, wanted.choices, dweights, rule)
    assert (np.abs(gradient - defined) <= bound).all()


def test_a_logit_that_is_no_number_is_seen() -> None:
    """Its token's weights are NaN in every score, and other tokens' are not; the root of softplus once made it 0."""
    logits = jnp.array([[0.0, 1.0, 2.0], [0.0, jnp.nan, 2.0]], jnp.float32)
    for score in ("softmax", "sigmoid", "sqrtsoftplus"):
        weights = np.asarray(jax.jit(partial(choose_experts, k=3, score=score))(logits).weights)
        assert np.isnan(weights).all(1).tolist() == [False, True]
        assert np.isfinite(weights[0]).all()


def test_debug_nans_sees_none_in_a_router() -> None:
    """Operation by operation, as people look for a NaN of their own: the one that stands for all is no finding."""
    with jax.debug_nans(True), jax.disable_jit():
        choices = choose_experts(jnp.array([[0.0, 1.0, 2.0, 3.0]]), 1, groups=2, kept_groups=1).choices
    assert choices.tolist() == [[3]]


def test_experts_are_in_the_order_of_their_logits() -> None:
    """Where nothing else decides: two scores that round to one are no tie, and zeros of both signs are one, as in torch
    and in its kernels."""
    logits = jnp.array([[40.0, 41.0, 39.0, 42.0], [-200.0, -300.0, 0.0, -150.0], [-0.0, 0.0, -1.0, -2.0]])
    for score in ("softmax", "sigmoid", "sqrtsoftplus"):
        made = jax.jit(partial(choose_experts, k=3, score=score))(logits)
        assert made.choices.tolist() == [[3, 1, 0], [2, 3, 0], [0, 1, 2]]


@pytest.mark.parametrize("score", ["sigmoid", "sqrtsoftplus"])
def test_losses_of_scores_that_underflow(score: Any, rng: np.random.Generator) -> None:
    """Tokens whose scores are all 0 in fp32 have shares nonetheless, and so a gradient: one such token once made the
    losses of a batch NaN."""
    logits = (3 * rng.standard_normal((16, E)) - 160 * (rng.random((16, 1)) < 0.5)).astype(np.float32)
    choice = octavo_numerics.choose_experts(logits, octavo_numerics.RouterRule(C, score=score), None, None)
    losses = jax.jit(partial(router_losses, score=score, sequences=2))
    expected = octavo_numerics.router_losses(logits, choice, score, sequences=2)
    # FP32 as above: a rounded difference of logits d moves a share, e^-d of the largest, by d units of it: 0.37 at most
    for loss, value in losses(logits, choice.choices)._asdict().items():
        np.testing.assert_allclose(value, expected[loss], rtol=FP32)
    moved = rng.standard_normal(logits.shape)
    gradient = np.asarray(jax.grad(lambda logits: losses(logits, choice.choices).aux)(logits), np.float64) * moved
    slope = _slope(
        lambda logits: octavo_numerics.router_losses(logits, choice, score)["aux"], logits.astype(np.float64), moved
    )
    assert abs(gradient.sum() - slope) <= FP32 * np.abs(gradient).sum() + 1e-8 * expected["aux"]


def test_narrow_and_wide_integers_replay(rng: np.random.Generator) -> None:
    """256 experts are no number of uint8, and 2^32 - 1 none of int32: neither wraps to another expert."""
    logits = rng.standard_normal((4, 256)).astype(np.float32)
    chosen = np.array([[0, 255], [3, 3], [128, 127], [1, 2]])
    wanted = choose_experts(logits, 2, replay=chosen.astype(np.int32))
    narrow = choose_experts(logits, 2, replay=chosen.astype(np.uint8))
    for one, other in zip(narrow, wanted, strict=True):
        assert np.array_equal(one, other)
    far = choose_experts(logits, 2, replay=np.full((4, 2), 2**32 - 1, np.uint32))
    assert not far.weights.any()
    assert not far.counts.any()


def test_router_says_what_does_not_fit() -> None:
    """Errors name the argument, what was given, and what is needed."""
    logits = jnp.zeros((4, 8))
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"k": 9}, "k is 9 and a token has 8 of 8 experts"),
        ({"k": True}, "k is True; give an integer of at least 1"),
        ({"groups": 3}, "groups is 3, kept_groups 1, and there are 8 experts"),
        ({"groups": 4, "k": 3}, "k is 3 and a token has 2 of 8 experts to choose from, as groups is 4"),
        ({"score": "tanh"}, "score is 'tanh'; give 'softmax', 'sigmoid' or 'sqrtsoftplus'"),
        ({"bias": jnp.zeros(7)}, r"bias has shape \[7\]; give \[8\]"),
        ({"bias": jnp.zeros(8, jnp.int32)}, "bias has dtype int32"),
        ({"replay": jnp.zeros((4, 1), jnp.int32)}, r"replay has shape \[4, 1\] and k is 2; give \[4, 2\]"),
        ({"replay": jnp.zeros((4, 2))}, r"replay has shape \[4, 2\] and dtype float32; give integers"),
        ({"logits": logits.astype(jnp.int32)}, "logits has dtype int32"),
        ({"logits": logits[None]}, r"logits has shape \[1, 4, 8\]; give \[T, E\]"),
        ({"scale": float("nan")}, "scale is nan; give a finite number"),
        ({"scale": 1e39}, r"scale is 1e\+39; give a finite number, in fp32"),
        ({"scale": 1 << 1030}, "scale is 11505"),
        ({"renormalize": 1}, "renormalize is 1; give True or False"),
    ]
    for changed, message in wrong:
        with pytest.raises(ValueError, match=message):
            choose_experts(**{"logits": logits, "k": 2, **changed})
    with pytest.raises(ValueError, match="sequences is 3 and there are 4 tokens"):
        router_losses(logits, jnp.zeros((4, 2), jnp.int32), sequences=3)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_subnormal_logits_do_not_tie(dtype: str, rng: np.random.Generator) -> None:
    """XLA's comparisons on a CPU take them for zero, so that the lowest experts were chosen; kernels and PyTorch choose
    the largest, as the definition does. Zeros of both signs tie."""
    logits = (rng.permuted(np.tile(np.arange(-8, 8), (33, 1)), axis=1) * 2.0**-133).astype(jnp.dtype(dtype))
    logits[::2] = np.copysign(logits[::2] * 0, rng.standard_normal(logits[::2].shape))
    chosen = jax.jit(lambda logits: choose_experts(logits, 3, backend="jax-reference").choices)(logits)
    wanted = octavo_numerics.choose_experts(logits, octavo_numerics.RouterRule(3)).choices
    np.testing.assert_array_equal(chosen, wanted)

"""A router's kernels against octavo_numerics: equal choices and counts, weights and gradients within their bounds."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from devices import PLACES
from router_bounds import gradient_is_bound, weights_are_bound
from router_calls import choose, choose_gradient

import octavo_numerics as numerics
from octavo_numerics import RouterRule

DTYPES = ("float32", "float16", "bfloat16")
SIDES = ((1, 1, 1), (33, 5, 5), (70, 32, 4), (19, 60, 6), (41, 128, 8), (9, 200, 32), (7, 512, 22), (5, 1024, 8))
"""(tokens, experts, choices): each number of experts that a lane may have, rows that end inside of a warp."""
SCORES: tuple[Any, ...] = ("softmax", "sigmoid", "sqrtsoftplus")


def draw(rng: np.random.Generator, tokens: int, experts: int, dtype: str) -> np.ndarray:
    """Logits that tie often, saturate and underflow: a few values, wide ones, zeros of both signs, -inf."""
    steps = rng.integers(-8, 9, (tokens, experts)) / 4
    wide = rng.standard_normal((tokens, experts)) * rng.choice([1.0, 30.0])
    odd = rng.choice([0.0, -0.0, 40.0, 41.0, -88.0, -200.0, -np.inf], (tokens, experts))
    kind = rng.integers(0, 8, (tokens, experts))
    return np.where(kind < 3, steps, np.where(kind < 7, wide, odd)).astype(dtype)


@pytest.mark.parametrize("device", PLACES)
@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_choices_are_those_of_the_logits(score: Any, dtype: str, device: str, rng: np.random.Generator) -> None:
    """Of any logits, also where scores tie after rounding; choices that are given are taken, and nobody's weighs 0."""
    for tokens, experts, k in SIDES:
        logits = draw(rng, tokens, experts, dtype)
        logits[0, 0] = 1.0  # a softmax needs one that is finite
        logits[:, 0] = np.where(np.isinf(logits.astype(np.float32)).all(1), 1, logits[:, 0])
        rule = RouterRule(k, score, renormalize=bool(rng.integers(2)), scale=float(rng.choice([1.0, 2.5])))
        replay = rng.integers(0, experts, (tokens, k))
        replay = np.where(rng.random(replay.shape) < 0.2, rng.choice([-1, experts, 1 << 40], replay.shape), replay)
        for given in (None, replay):
            made, wanted = (
                choose(device, logits, rule, replay=given),
                numerics.choose_experts(logits, rule, None, given),
            )
            assert np.array_equal(made.choices, wanted.choices)
            assert np.array_equal(made.counts, wanted.counts)
            assert weights_are_bound(made.weights, logits, wanted, rule)


@pytest.mark.parametrize("device", PLACES)
@pytest.mark.parametrize("score", SCORES)
def test_a_bias_and_groups_choose_by_scores(score: Any, device: str, rng: np.random.Generator) -> None:
    """Scores in steps that rounding does not close, equal ones in plenty: they tie, to the lower index.

    A group's experts have one bias, for sums such as (a + 1) + b and a + (b + 1) are rounded apart.
    """
    sides = ((20, 16, 4, 2, 3), (33, 256, 8, 4, 8), (41, 64, 32, 5, 6), (19, 6, 6, 3, 3))
    for tokens, experts, groups, kept, k in sides:
        logits = (rng.integers(0, 17, (tokens, experts)) / 4).astype(np.float32)
        bias = np.repeat(rng.integers(-2, 3, groups) / 4, experts // groups).astype(np.float32)
        for rule in (RouterRule(k, score, groups, kept), RouterRule(k, score)):
            made, wanted = choose(device, logits, rule, bias), numerics.choose_experts(logits, rule, bias)
            assert np.array_equal(made.choices, wanted.choices)
            assert np.array_equal(made.counts, wanted.counts)
            assert weights_are_bound(made.weights, logits, wanted, rule)


@pytest.mark.parametrize("device", PLACES)
@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients(score: Any, dtype: str, device: str, rng: np.random.Generator) -> None:
    """Of each score, renormalized or not; nobody's choice and a choice that stands twice among them."""
    for tokens, experts, k in SIDES:
        logits = np.clip(draw(rng, tokens, experts, dtype).astype(np.float32), -200, 90).astype(dtype)
        rule = RouterRule(k, score, renormalize=bool(rng.integers(2)), scale=float(rng.choice([1.0, 2.5])))
        choices = rng.integers(-1, experts + 1, (tokens, k))
        dweights = rng.standard_normal((tokens, k)).astype(np.float32)
        made = choose_gradient(device, logits, rule, choices, dweights)
        assert gradient_is_bound(made, logits, choices, dweights, rule)


@pytest.mark.parametrize("device", PLACES)
@pytest.mark.parametrize("renormalize", [True, False])
def test_roots_of_softplus_that_underflow_weigh_as_defined(
    renormalize: bool, device: str, rng: np.random.Generator
) -> None:
    """Down to a logit of -174, where fp32 holds no softplus but its root: a token whose logits were all below -104 once
    weighed 0, and its experts' results were gone."""
    logits = (rng.uniform(-190, -10, (64, 1)) - 4 * rng.random((64, 40))).astype(np.float32)
    rule = RouterRule(5, "sqrtsoftplus", renormalize=renormalize)
    made, wanted = choose(device, logits, rule), numerics.choose_experts(logits, rule)
    assert np.array_equal(made.choices, wanted.choices)
    assert weights_are_bound(made.weights, logits, wanted, rule)
    dweights = rng.uniform(-1, 1, wanted.choices.shape).astype(np.float32)
    gradient = choose_gradient(device, logits, rule, wanted.choices, dweights)
    assert gradient_is_bound(gradient, logits, wanted.choices, dweights, rule)


@pytest.mark.parametrize("device", PLACES)
def test_nan_comes_first_and_no_tokens_choose_nothing(device: str) -> None:
    """As in torch's sort; counts are zeros that somebody wrote."""
    logits = np.array([[1, np.nan, 3, np.nan]], np.float32)
    made = choose(device, logits, RouterRule(3))
    assert made.choices.tolist() == [[1, 3, 2]]
    assert np.isnan(made.weights).all()
    nothing = choose(device, np.zeros((0, 5), np.float32), RouterRule(2))
    assert nothing.counts.tolist() == [0] * 5


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"k": 5}, "k is less than 1 or past the experts"),
        ({"groups": 3}, "groups does not divide experts"),
        ({"scale": float("inf")}, "scale is not finite"),
    ],
)
def test_what_does_not_fit_is_refused(changed: dict[str, Any], message: str) -> None:
    """Before anything is launched, in a sentence; limits of a warp are said to be such."""
    with pytest.raises(ValueError, match=message):
        choose("cpu", np.zeros((2, 4), np.float32), RouterRule(**{"k": 2, **changed}))
    with pytest.raises(ValueError, match="experts is past 1024, the most that a warp holds"):
        choose("cpu", np.zeros((2, 1025), np.float32), RouterRule(2))
    with pytest.raises(ValueError, match="k is past 32, the most that a warp holds"):
        choose("cpu", np.zeros((2, 64), np.float32), RouterRule(33))

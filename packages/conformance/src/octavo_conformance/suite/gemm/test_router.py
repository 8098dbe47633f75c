"""A router's choices, weights and counts, and the gradient of its logits, against octavo_numerics."""

from __future__ import annotations

from typing import Any

import numpy as np

import octavo_numerics
from octavo.router import RouterRule, Score
from octavo_conformance.cards import selections
from octavo_conformance.cards.needs import needs
from octavo_conformance.oracles.checks import assert_same_bits
from octavo_conformance.oracles.keeping import keeping
from octavo_conformance.problems.case import Case
from octavo_conformance.problems.inputs import DTYPES, Array, Rng

TOKENS, EXPERTS, CHOICES = 37, 40, 5
SCORES: tuple[Score, ...] = ("softmax", "sigmoid", "sqrtsoftplus")
ROUNDING = {"float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}
SMALLEST = {"float32": 2.0**-149, "float16": 2.0**-24, "bfloat16": 2.0**-133}


def draw_logits(rng: Rng, case: Case) -> Array:
    """Logits that tie often, in which scores saturate: steps of a quarter, and numbers of which a sigmoid is 1. All of
    some tokens' are so low that fp32 has neither sigmoid nor softplus of them, and roots of softplus nonetheless."""
    steps = rng.integers(-8, 9, (TOKENS, EXPERTS)) / 4
    logits = np.where(rng.random(steps.shape) < 0.1, rng.choice([40.0, 41.0, -30.0], steps.shape), steps)
    return np.where(rng.random((TOKENS, 1)) < 0.2, steps - 110, logits).astype(DTYPES[case.dtype])


def draw_rule(rng: Rng, score: Score) -> RouterRule:
    """Renormalized or not, scaled or not."""
    return RouterRule(CHOICES, score, renormalize=bool(rng.integers(2)), scale=float(rng.choice([1.0, 2.5])))


def asked(rule: RouterRule) -> dict[str, Any]:
    """What a request says of it."""
    parts = rule.groups if rule.by_groups else 1
    return {"groups": EXPERTS, "choices": rule.k, "expert_groups": parts}


def assert_chosen(case: Case, made: Any, logits: Array, expected: octavo_numerics.Choice, rule: RouterRule) -> None:
    """Equal choices and counts, weights within their bound."""
    choices, weights, counts = made
    assert_same_bits(case.integers(choices), expected.choices, "choices")
    assert_same_bits(case.integers(counts), expected.counts, "counts")
    weights = case.numpy(weights)
    assert weights.dtype == np.float32, f"weights are {weights.dtype}; they are float32"
    bound = octavo_numerics.choice_weights_bound(logits, expected, rule)
    assert (np.abs(weights - expected.weights) <= bound).all(), "weights are past octavo_numerics.choice_weights_bound"


@needs("choose_experts", selections.unquantized)
def test_choices(case: Case, rng: Rng) -> None:
    """By logit, ties to the lower index, whatever scores round to; nobody's choice weighs 0 and counts nowhere."""
    for score in SCORES:
        logits, rule = draw_logits(rng, case), draw_rule(rng, score)
        replay = rng.integers(-1, EXPERTS + 1, (TOKENS, CHOICES))
        run = keeping(case, "choose_experts", case.plan("choose_experts", **asked(rule)).run)
        for given in (None, replay):
            made = run(case.array(logits), None, None if given is None else case.array(given), rule)
            expected = octavo_numerics.choose_experts(logits, rule, None, given)
            assert_chosen(case, made, logits, expected, rule)


@needs("choose_experts", selections.unquantized)
def test_choices_with_a_bias_and_in_groups(case: Case, rng: Rng) -> None:
    """The bias chooses and does not weigh. Logits and biases are such that no two sums of scores are near: steps that
    differ for each expert."""
    steps = np.stack([rng.permutation(EXPERTS) for _ in range(TOKENS)]) / 8
    logits, bias = steps.astype(DTYPES[case.dtype]), (np.arange(EXPERTS) % 3).astype(np.float32)
    for rule in (RouterRule(CHOICES, "sigmoid", 8, 3), RouterRule(CHOICES, "sqrtsoftplus")):
        run = keeping(case, "choose_experts", case.plan("choose_experts", **asked(rule)).run)
        made = run(case.array(logits), case.array(bias), None, rule)
        assert_chosen(case, made, logits, octavo_numerics.choose_experts(logits, rule, bias), rule)


@needs("choose_experts", selections.unquantized)
def test_choices_of_logits_that_are_no_numbers(case: Case, rng: Rng) -> None:
    """NaN is chosen before all numbers, so that a model that has diverged says so: its weight is NaN, and those are
    that are divided by it."""
    for score in SCORES:
        logits, rule = with_nan(rng, draw_logits(rng, case)), draw_rule(rng, score)
        made = case.plan("choose_experts", **asked(rule)).run(case.array(logits), None, None, rule)
        expected = octavo_numerics.choose_experts(logits, rule)
        assert_same_bits(case.integers(made[0]), expected.choices, "choices")
        assert_same_bits(case.integers(made[2]), expected.counts, "counts")
        weights, bound = case.numpy(made[1]), octavo_numerics.choice_weights_bound(logits, expected, rule)
        assert_near_or_nan(weights.astype(np.float64), expected.weights, bound, "weights")


@needs("choose_gradient", selections.unquantized)
def test_gradient_of_logits_that_are_no_numbers(case: Case, rng: Rng) -> None:
    """It is NaN where the definition's is."""
    for score in SCORES:
        logits, rule = with_nan(rng, draw_logits(rng, case)), draw_rule(rng, score)
        choices = octavo_numerics.choose_experts(logits, rule).choices
        given = logits, choices, rng.standard_normal((TOKENS, CHOICES)).astype(np.float32)
        run = keeping(case, "choose_gradient", case.plan("choose_gradient", **asked(rule)).run)
        made = case.numpy(run(*(case.array(array) for array in given), rule)).astype(np.float64)
        assert_near_or_nan(made, octavo_numerics.choose_gradient(*given, rule), gradient_bound(case, given, rule), "dx")


def with_nan(rng: Rng, logits: Array) -> Array:
    """Some of them NaN."""
    logits[rng.random(logits.shape) < 0.02] = np.nan
    logits[int(rng.integers(len(logits))), int(rng.integers(EXPERTS))] = np.nan
    return logits


def assert_near_or_nan(made: Array, expected: Array, bound: Array, what: str) -> None:
    """NaN where the definition has it, and within the bound where there is one."""
    assert np.array_equal(np.isnan(made), np.isnan(expected)), f"{what} are NaN elsewhere than the definition's"
    judged = np.isfinite(bound) & np.isfinite(expected)
    assert (np.abs(made - expected)[judged] <= bound[judged]).all(), f"{what} are past their bound"


def gradient_bound(case: Case, given: tuple[Array, Array, Array], rule: RouterRule) -> Array:
    """What a gradient that is rounded to the logits' dtype may be off by."""
    unit, expected = ROUNDING[case.dtype], octavo_numerics.choose_gradient(*given, rule)
    bound = octavo_numerics.choose_gradient_bound(*given, rule)
    return np.asarray(bound * (1 + unit) + np.abs(expected) * unit + SMALLEST[case.dtype])


@needs("choose_gradient", selections.unquantized)
def test_gradient_of_the_logits(case: Case, rng: Rng) -> None:
    """From the weights' gradient, for choices of which some are nobody's and some stand twice."""
    for score in SCORES:
        logits, rule = draw_logits(rng, case), draw_rule(rng, score)
        choices, dweights = rng.integers(-1, EXPERTS + 1, (TOKENS, CHOICES)), rng.standard_normal((TOKENS, CHOICES))
        given = logits, choices, dweights.astype(np.float32)
        run = keeping(case, "choose_gradient", case.plan("choose_gradient", **asked(rule)).run)
        dlogits = case.numpy(run(*(case.array(array) for array in given), rule))
        assert dlogits.dtype == logits.dtype, f"dlogits are {dlogits.dtype}, the logits {logits.dtype}"
        made, expected = dlogits.astype(np.float64), octavo_numerics.choose_gradient(*given, rule)
        assert (np.abs(made - expected) <= gradient_bound(case, given, rule)).all(), (
            "past octavo_numerics.choose_gradient_bound"
        )

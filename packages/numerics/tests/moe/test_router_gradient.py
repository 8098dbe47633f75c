"""The gradient of a router's logits: the slopes of its definition along random directions."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from octavo_numerics import RouterRule, choose_experts, choose_gradient, choose_gradient_bound

RULES: tuple[Any, ...] = (
    RouterRule(3), RouterRule(3, renormalize=False), RouterRule(3, "sigmoid", scale=2.5), RouterRule(3, "sqrtsoftplus"),
)  # fmt: skip


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_gradient_is_the_slope_of_the_weights(rule: RouterRule, rng: np.random.Generator) -> None:
    """Central differences in float64: their own error is some 1e-9 of the addends. A choice may be nobody's, or stand
    twice; the bound of fp32 is far less than the gradient."""
    logits, direction = rng.standard_normal((9, 7)) * 2, rng.standard_normal((9, 7))
    choices, dweights = rng.integers(-1, 8, (9, 3)), rng.standard_normal((9, 3))

    def value(step: float) -> float:
        return float((choose_experts(logits + step * direction, rule, None, choices).weights * dweights).sum())

    gradient = choose_gradient(logits, choices, dweights, rule)
    slope = (value(1e-6) - value(-1e-6)) / 2e-6
    scale = np.abs(gradient * direction).sum() + np.abs(dweights).sum() * rule.scale
    assert abs((gradient * direction).sum() - slope) <= 1e-8 * scale
    bound = choose_gradient_bound(logits, choices, dweights, rule)
    assert np.isfinite(bound[((choices >= 0) & (choices < 7)).any(1)]).all()
    assert bound[np.isfinite(bound)].max() <= 2.0**-12 * scale


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_choices_of_nobody_have_no_gradient(rule: RouterRule, rng: np.random.Generator) -> None:
    """Their scores add up to nothing, by which nothing must be divided."""
    logits, choices, dweights = rng.standard_normal((9, 7)), rng.choice([-1, 7], (9, 3)), rng.standard_normal((9, 3))
    assert not choose_gradient(logits, choices, dweights, rule).any()
    assert not choose_gradient_bound(logits, choices, dweights, rule).any()


@pytest.mark.parametrize("rule", [*RULES, RouterRule(3, "sqrtsoftplus", renormalize=False)], ids=str)
def test_a_logit_that_is_no_number_has_no_gradient_that_is_one(rule: RouterRule, rng: np.random.Generator) -> None:
    """It is chosen before all others, and its gradient is NaN for every score; other tokens have theirs."""
    logits, dweights = rng.standard_normal((9, 7)), rng.standard_normal((9, 3))
    clean = choose_gradient(logits, choose_experts(logits, rule).choices, dweights, rule)
    logits[4, 2] = np.nan
    choices = choose_experts(logits, rule).choices
    gradient = choose_gradient(logits, choices, dweights, rule)
    assert choices[4, 0] == 2
    assert np.isnan(gradient[4, 2])
    assert np.array_equal(np.delete(gradient, 4, 0), np.delete(clean, 4, 0))

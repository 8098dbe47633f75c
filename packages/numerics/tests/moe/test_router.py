"""The definition of a router beside the sentences that describe it, token by token in numbers of Python."""

from __future__ import annotations

import math

import numpy as np
import pytest

from octavo_numerics import RouterRule, choose_experts, router_losses

T, E, K = 40, 12, 3
UNIT = 2.0**-53
WEIGHTS = 2 * 17 * UNIT
"""Both sides are float64 and each is off by 17 units at most. A function is right to an ulp, which is 2 units, and the
sum of E positive terms has E - 1 = 11 roundings. A softmax then has 2 in its numerator, 2 + 11 in its denominator, 1 in
the quotient and 1 in the scale. A weight that is divided by the sum of K has less: the denominators of the scores are
the same, so that 3 are left of its score, 3 + 3 of the sum, and 2 of the quotient and the scale."""
LOSSES = 2 * (T + E + 60) * UNIT
"""Of each side: 17 units of a score, 17 + 12 of its share, T of a mean over tokens, E of a sum over experts, and less
than 14 of quotients and products. z has less: logsumexp of E normal logits is above 1, and 28 units of it are off."""
RULES = (
    RouterRule(K),
    RouterRule(K, renormalize=False),
    RouterRule(K, "sigmoid", scale=2.5),
    RouterRule(K, "sqrtsoftplus"),
    RouterRule(K, "sigmoid", groups=4, kept_groups=2),
    RouterRule(K, groups=4, kept_groups=4),
)


def scores_of(logits: list[float], score: str) -> list[float]:
    if score == "softmax":
        total = sum(math.exp(each - max(logits)) for each in logits)
        return [math.exp(each - max(logits)) / total for each in logits]
    if score == "sigmoid":
        return [1 / (1 + math.exp(-each)) for each in logits]
    return [math.sqrt(math.log1p(math.exp(each))) for each in logits]


def largest(values: dict[int, float], k: int) -> list[int]:
    """The keys of the k largest, ties to the lower key."""
    return sorted(values, key=lambda key: (-values[key], key))[:k]


def chosen(logits: list[float], bias: list[float] | None, rule: RouterRule) -> list[int]:
    scores = scores_of(logits, rule.score)
    by = dict(enumerate(scores if bias is None else [s + b for s, b in zip(scores, bias, strict=True)]))
    if bias is None and rule.kept_groups == rule.groups:
        by = dict(enumerate(logits))
    size = E // rule.groups
    sums = {g: sum(sorted(by[e] for e in range(g * size, (g + 1) * size))[-2:]) for g in range(rule.groups)}
    kept = largest(sums, rule.kept_groups)
    return largest({expert: value for expert, value in by.items() if expert // size in kept}, rule.k)


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("rule", RULES, ids=str)
def test_choices_and_weights(rule: RouterRule, biased: bool, rng: np.random.Generator) -> None:
    """The k largest by score and bias out of the kept groups, weighed by their scores alone, and counted."""
    logits = rng.integers(-8, 9, (T, E)) / 4 if rule.score == "softmax" and not biased else rng.standard_normal((T, E))
    bias = rng.standard_normal(E) / 4 if biased else None
    made = choose_experts(logits, rule, bias)
    wanted = [chosen(list(row), None if bias is None else list(bias), rule) for row in logits]
    assert made.choices.tolist() == wanted
    assert made.counts.tolist() == [sum(row.count(expert) for row in wanted) for expert in range(E)]
    for row, choices, weights in zip(logits, wanted, made.weights, strict=True):
        scores = scores_of(list(row), rule.score)
        own = [scores[expert] for expert in choices]
        total = sum(own) if rule.renormalize else 1.0
        np.testing.assert_allclose(weights, [score / total * rule.scale for score in own], rtol=WEIGHTS)


def test_groups_are_kept_by_their_two_largest_scores(rng: np.random.Generator) -> None:
    """Two good experts (0.88 each) are worth more than the best one and a middling one (0.98 and 0.5)."""
    of_groups = np.array([[4.0, 0.0, 0.0], [2.0, 2.0, 0.0], [0.0, 0.0, 0.0], [1.0, 1.0, 1.0]])
    logits = rng.permuted(np.stack([rng.permutation(of_groups) for _ in range(T)]), axis=2).reshape(T, E)
    made = choose_experts(logits, RouterRule(2, "sigmoid", groups=4, kept_groups=1))
    assert made.choices.tolist() == [np.flatnonzero(row == 2.0).tolist() for row in logits]


def test_replayed_choices() -> None:
    """They are taken as they are: the scores of today, no weight and no count of what goes nowhere."""
    logits = np.log([[1.0, 2.0, 3.0, 2.0]])
    made = choose_experts(logits, RouterRule(3), np.array([9.0, 0, 0, 0]), np.array([[1, -1, 2]]))
    assert made.choices.tolist() == [[1, -1, 2]]
    np.testing.assert_allclose(made.weights, [[0.4, 0.0, 0.6]], rtol=WEIGHTS)
    assert made.counts.tolist() == [0, 1, 1, 0]


def test_what_is_no_number_is_chosen_first() -> None:
    """A router that broke is seen, and not worked around."""
    made = choose_experts(np.array([[1.0, np.nan, 3.0, np.nan], [1.0, -np.inf, np.inf, 2.0]]), RouterRule(3))
    assert made.choices.tolist() == [[1, 3, 2], [2, 3, 0]]


@pytest.mark.parametrize("score", ["softmax", "sigmoid", "sqrtsoftplus"])
def test_losses(score: str, rng: np.random.Generator) -> None:
    """z, aux and sequence are the sums that their papers write; a balanced router's aux is 1."""
    logits = rng.standard_normal((T, E))
    rule = RouterRule(K, score)  # type: ignore[arg-type]
    choice = choose_experts(logits, rule)

    def balance(tokens: range) -> float:
        shares = [
            [each / math.fsum(row) for each in row] for row in (scores_of(list(logits[t]), score) for t in tokens)
        ]
        taken = [sum(expert in choice.choices[t] for t in tokens) / (len(tokens) * K) for expert in range(E)]
        return E * sum(f * math.fsum(row[e] for row in shares) / len(tokens) for e, f in enumerate(taken))

    made = router_losses(logits, choice, rule.score, sequences=4)
    z = math.fsum(math.log(math.fsum(map(math.exp, row))) ** 2 for row in logits) / T
    sequences = [balance(range(first, first + T // 4)) for first in range(0, T, T // 4)]
    wanted = {"z": z, "aux": balance(range(T)), "sequence": math.fsum(sequences) / 4}
    assert made.keys() == wanted.keys()
    for name, value in wanted.items():
        assert math.isclose(made[name], value, rel_tol=LOSSES), name
    even = np.zeros((E, E))
    each = choose_experts(even, RouterRule(1), replay=np.arange(E)[:, None])
    assert math.isclose(router_losses(even, each, rule.score)["aux"], 1.0, rel_tol=WEIGHTS)

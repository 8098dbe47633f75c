"""A MoE layer's router: scores, choices, and losses.

Scores are softmax (Shazeer et al., arXiv 1701.06538), sigmoid with a bias that chooses only (Wang et al.,
arXiv 2408.15664) and groups of experts (DeepSeek-V3, arXiv 2412.19437, section 2.1.2), or the root of softplus.
"""

from __future__ import annotations

from typing import Any, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from octavo.errors import one_of
from octavo.router import RouterRule, Score, check_choices


class Choice(NamedTuple):
    """choices int64 [T, k], their weights float64 [T, k], and counts int64 [E], the tokens of each expert."""

    choices: NDArray[np.int64]
    weights: NDArray[np.float64]
    counts: NDArray[np.int64]


def route_scores(logits: NDArray[Any], score: Score) -> NDArray[np.float64]:
    """The scores of logits [T, E]; NaN for a logit that is NaN, without a warning. ValueError for an unknown name."""
    one_of("score", score, get_args(Score))
    with np.errstate(invalid="ignore", over="ignore"):
        return _scores(logits.astype(np.float64), score)


def _scores(wide: NDArray[np.float64], score: Score) -> NDArray[np.float64]:
    if score == "softmax":
        powers = np.exp(wide - wide.max(-1, keepdims=True))
        return np.asarray(powers / powers.sum(-1, keepdims=True))
    if score == "sigmoid":
        return np.asarray(1 / (1 + np.exp(-wide)))
    return np.asarray(np.sqrt(np.logaddexp(0, wide)))


def in_order(values: NDArray[Any]) -> NDArray[np.int64]:
    """The places of each row's numbers, the largest first: NaN before all, and the lower place among equals."""
    absent = np.isnan(values)
    return np.lexsort((np.where(absent, 0.0, -values), ~absent))


def are_experts(choices: NDArray[np.int64], experts: int) -> NDArray[np.bool_]:
    """Which choices are experts: 0 to E - 1. Any other number stands for no expert."""
    return (choices >= 0) & (choices < experts)


def of_choices(values: NDArray[np.float64], choices: NDArray[np.int64]) -> NDArray[np.float64]:
    """The values [T, k] of these choices out of [T, E]; 0 of a choice outside of 0 to E - 1."""
    there = are_experts(choices, values.shape[1])
    return np.where(there, np.take_along_axis(values, np.where(there, choices, 0), 1), 0.0)


def divisor_of(scores: NDArray[np.float64], rule: RouterRule) -> NDArray[np.float64]:
    """What the scores [T, k] of a token's choices are divided by, [T, 1]."""
    return scores.sum(-1, keepdims=True) + 1e-20 if rule.renormalize else np.ones((len(scores), 1))


def choose_experts(
    logits: NDArray[Any],
    rule: RouterRule,
    bias: NDArray[Any] | None = None,
    replay: NDArray[Any] | None = None,
) -> Choice:
    """The choices for logits [T, E], in float64: the k largest, NaN before all, the lower expert among equals.

    bias     [E], added to the scores for choosing; weights are without it
    replay   [T, k], choices to take instead; one outside of 0 to E - 1 goes to no expert and weighs 0

    Raises ValueError for a rule that does not fit so many experts.
    """
    tokens, experts = logits.shape
    check_choices(experts, rule.k, rule.groups, rule.kept_groups)
    scores = route_scores(logits, rule.score)
    chosen_by = scores if bias is None else scores + bias
    if bias is None and not rule.by_groups:
        chosen_by = logits.astype(np.float64)  # in the order of the scores, which may round two logits to one score
    if replay is None:
        if rule.by_groups:
            grouped = chosen_by.reshape(tokens, rule.groups, experts // rule.groups)
            sums = np.sort(grouped, -1)[..., -2:].sum(-1)
            kept = in_order(sums)[:, : rule.kept_groups]
            outside = np.ones((tokens, rule.groups), bool)
            np.put_along_axis(outside, kept, False, 1)
            chosen_by = np.where(np.repeat(outside, experts // rule.groups, 1), -np.inf, chosen_by)
        replay = in_order(chosen_by)[:, : rule.k]
    choices = replay.astype(np.int64)
    there = are_experts(choices, experts)
    weights = of_choices(scores, choices)
    counts = np.bincount(choices[there], minlength=experts).astype(np.int64)
    return Choice(choices, weights / divisor_of(weights, rule) * rule.scale, counts)


def router_losses(logits: NDArray[Any], choice: Choice, score: Score, sequences: int = 1) -> dict[str, float]:
    """The auxiliary losses of a router, without their coefficients.

    z           mean over tokens of logsumexp(logits)^2 (Zoph et al., arXiv 2202.08906)
    aux         E sum_e f_e P_e, f_e the share of all choices that expert e got, P_e the mean over tokens of its share
                of their scores (Fedus et al., arXiv 2101.03961)
    sequence    the same within each of `sequences` runs of tokens of equal length, averaged over these

    Without tokens each is 0.
    """
    if not logits.shape[0]:
        return {"z": 0.0, "aux": 0.0, "sequence": 0.0}
    wide = logits.astype(np.float64)
    largest = wide.max(-1, keepdims=True)
    total = np.log(np.exp(wide - largest).sum(-1)) + largest[:, 0]
    scores = route_scores(logits, score)
    shares = scores / scores.sum(-1, keepdims=True)
    experts = wide.shape[1]

    def balance(choices: NDArray[np.int64], parts: NDArray[np.float64]) -> float:
        there = choices[(choices >= 0) & (choices < experts)]
        counts = np.bincount(there, minlength=experts)
        return float(experts * (counts / choices.size * parts.mean(0)).sum())

    runs = zip(np.split(choice.choices, sequences), np.split(shares, sequences), strict=True)
    return {
        "z": float((total**2).mean()),
        "aux": balance(choice.choices, shares),
        "sequence": float(np.mean([balance(*run) for run in runs])),
    }

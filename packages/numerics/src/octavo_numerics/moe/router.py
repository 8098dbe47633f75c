"""A MoE layer's router: scores, choices, and losses.

Scores are softmax (Shazeer et al., arXiv 1701.06538), sigmoid with a bias that chooses only (Wang et al.,
arXiv 2408.15664) and groups of experts (DeepSeek-V3, arXiv 2412.19437, section 2.1.2), or the root of softplus.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

Score = Literal["softmax", "sigmoid", "sqrtsoftplus"]


class Choice(NamedTuple):
    """choices int64 [T, k], their weights float64 [T, k], and counts int64 [E], the tokens of each expert."""

    choices: NDArray[np.int64]
    weights: NDArray[np.float64]
    counts: NDArray[np.int64]


@dataclass(frozen=True)
class RouterRule:
    """How a router chooses.

    k                     choices of each token, by score plus bias from the largest down, ties to the lower index; by
                          logit where neither a bias nor groups decide, for scores of two logits may round to one
    score                 of each logit: over a token's experts, or of each on its own
    groups, kept_groups   the experts are `groups` runs of equal length, of which a token's choices come from the
                          `kept_groups` with the largest sums of their two largest scores plus bias, ties likewise
    renormalize           weights are divided by their sum over a token's choices plus 1e-20
    scale                 multiplies the weights
    """

    k: int
    score: Score = "softmax"
    groups: int = 1
    kept_groups: int = 1
    renormalize: bool = True
    scale: float = 1.0


def route_scores(logits: NDArray[Any], score: Score) -> NDArray[np.float64]:
    """The scores of logits [T, E]."""
    wide = logits.astype(np.float64)
    if score == "softmax":
        powers = np.exp(wide - wide.max(-1, keepdims=True))
        return np.asarray(powers / powers.sum(-1, keepdims=True))
    if score == "sigmoid":
        return np.asarray(1 / (1 + np.exp(-wide)))
    return np.asarray(np.sqrt(np.logaddexp(0, wide)))


def choose_experts(
    logits: NDArray[Any],
    rule: RouterRule,
    bias: NDArray[Any] | None = None,
    replay: NDArray[Any] | None = None,
) -> Choice:
    """The choices for logits [T, E], in float64.

    bias     [E], added to the scores for choosing; weights are without it
    replay   [T, k], choices to take in the place of those; -1 goes nowhere, and weighs 0
    """
    tokens, experts = logits.shape
    scores = route_scores(logits, rule.score)
    chosen_by = scores if bias is None else scores + bias
    if bias is None and rule.kept_groups >= rule.groups:
        chosen_by = logits.astype(np.float64)  # of which each score is an increasing function, but for rounding
    if replay is None:
        if rule.kept_groups < rule.groups:
            grouped = chosen_by.reshape(tokens, rule.groups, experts // rule.groups)
            sums = np.sort(grouped, -1)[..., -2:].sum(-1)
            kept = np.argsort(-sums, -1, kind="stable")[:, : rule.kept_groups]
            outside = np.ones((tokens, rule.groups), bool)
            np.put_along_axis(outside, kept, False, 1)
            chosen_by = np.where(np.repeat(outside, experts // rule.groups, 1), -np.inf, chosen_by)
        replay = np.argsort(-chosen_by, -1, kind="stable")[:, : rule.k]
    choices = replay.astype(np.int64)
    there = (choices >= 0) & (choices < experts)
    weights = np.where(there, np.take_along_axis(scores, np.where(there, choices, 0), 1), 0.0)
    if rule.renormalize:
        weights = weights / (weights.sum(-1, keepdims=True) + 1e-20)
    counts = np.bincount(choices[there], minlength=experts).astype(np.int64)
    return Choice(choices, weights * rule.scale, counts)


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

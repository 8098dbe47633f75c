"""The gradient of a router's logits, and how far fp32 kernels may be off from it and from the choices' weights.

`octavo_numerics.choose_experts` defines the choices and their weights. u is 2^-24.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.router import RouterRule, Score
from octavo_numerics.moe.router import Choice, are_experts, divisor_of, of_choices, route_scores

F64 = NDArray[np.float64]

_U = 2.0**-24
_TINY = 2.0**-126  # what a score may be off by where fp32 may flush it to 0
_FAR = 200.0  # below the largest logit an exponential is 0 in fp32


def _logistic(x: F64) -> F64:
    with np.errstate(over="ignore"):
        return 1 / (1 + np.exp(-x))


def _slopes(logits: F64, score: Score) -> F64:
    """The derivative of each score by its own logit; for softmax without the part that all logits share."""
    scores = route_scores(logits, score)
    if score == "softmax":
        return scores
    if score == "sigmoid":
        return scores * _logistic(-logits)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(scores == 0, 0.0, _logistic(logits) / (2 * scores))


def _spread(values: F64, choices: NDArray[np.int64], experts: int) -> F64:
    """Sums [T, E] of values [T, k] by expert."""
    sums = np.zeros((len(values), experts))
    there = are_experts(choices, experts)
    np.add.at(sums, (np.nonzero(there)[0], choices[there]), values[there])
    return sums


def choose_gradient(
    logits: NDArray[Any], choices: NDArray[Any], dweights: NDArray[Any], rule: RouterRule
) -> NDArray[np.float64]:
    """The gradient of logits [T, E], in float64, from that of the weights of these choices, both [T, k].

    Choices have no gradient, and so a bias has none. A choice outside of 0 to E - 1 adds nothing.
    """
    wide, chosen = logits.astype(np.float64), choices.astype(np.int64)
    picked = of_choices(route_scores(wide, rule.score), chosen)
    there = are_experts(chosen, wide.shape[1])
    dscores = np.where(there, dweights.astype(np.float64) * rule.scale, 0.0)
    divisor = divisor_of(picked, rule)
    if rule.renormalize:
        dscores = (dscores - (dscores * picked / divisor).sum(-1, keepdims=True)) / divisor
        dscores = np.where(there, dscores, 0.0)
    shared = (dscores * picked).sum(-1, keepdims=True) if rule.score == "softmax" else 0.0
    gradient: F64 = _slopes(wide, rule.score) * (_spread(dscores, chosen, wide.shape[1]) - shared)
    return gradient


def choice_weights_bound(logits: NDArray[Any], choice: Choice, rule: RouterRule) -> NDArray[np.float64]:
    """What an fp32 weight may be off by, [T, k].

    An exponential or a logarithm is within 4 u, and the rounding of its argument l - max costs u |l - max| more. A
    softmax's sum of E terms is within (1.4 E + 4) u, for x exp(-x) is at most 0.37; a sigmoid, or the root of softplus,
    is within 12 u. A renormalized weight has the error of two scores, and k + 4 roundings.
    """
    relative = _score_error(logits, choice.choices, rule)
    divisor = divisor_of(of_choices(route_scores(logits, rule.score), choice.choices), rule)
    return np.abs(choice.weights) * relative + (1 + abs(rule.scale) / divisor) * _TINY


def choose_gradient_bound(
    logits: NDArray[Any], choices: NDArray[Any], dweights: NDArray[Any], rule: RouterRule
) -> NDArray[np.float64]:
    """What an fp32 gradient of the logits may be off by before it is rounded, [T, E].

    It is the error of the weights and k + 8 roundings, relative to the magnitudes of the gradient's addends; 0 for a
    token none of whose choices is an expert.
    """
    wide, chosen = logits.astype(np.float64), choices.astype(np.int64)
    picked = of_choices(route_scores(wide, rule.score), chosen)
    divisor = divisor_of(picked, rule)
    there = are_experts(chosen, wide.shape[1])
    given = np.where(there, np.abs(dweights.astype(np.float64) * rule.scale), 0.0)
    if rule.renormalize:
        given = (given + (given * picked / divisor).sum(-1, keepdims=True)) / divisor
    shared = (given * picked).sum(-1, keepdims=True) if rule.score == "softmax" else 0.0
    slopes = np.abs(_slopes(wide, rule.score))
    addends = slopes * (_spread(given, chosen, wide.shape[1]) + shared)
    relative = 2 * _score_error(logits, chosen, rule).max(-1, keepdims=True)
    relative = relative + _score_error(logits, np.arange(wide.shape[1])[None].repeat(len(wide), 0), rule)
    relative = relative + (2 * chosen.shape[1] + 8) * _U
    bound = addends * relative + (1 + given.sum(-1, keepdims=True)) * (1 + slopes / divisor) * _TINY
    return np.where(there.any(-1, keepdims=True), bound, 0.0)


def _score_error(logits: NDArray[Any], choices: NDArray[np.int64], rule: RouterRule) -> NDArray[np.float64]:
    """The relative error of the choices' weights: that of their scores, or, where they are renormalized, twice the
    largest of a token and the roundings of the division."""
    wide = logits.astype(np.float64)
    units = np.full(wide.shape, 12.0)
    if rule.score == "softmax":
        units = np.minimum(wide.max(-1, keepdims=True) - wide, _FAR) + 1.4 * wide.shape[1] + 10
    picked = of_choices(units, choices)
    if rule.renormalize:
        picked = 2 * picked.max(-1, keepdims=True) + choices.shape[1] + np.zeros_like(picked)
    return (picked + 4) * _U

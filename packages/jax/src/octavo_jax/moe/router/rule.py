"""What decides a choice: octavo.router.RouterRule from the arguments of a router, checked."""

from __future__ import annotations

from dataclasses import fields
from typing import get_args

import numpy as np

from octavo.errors import one_of
from octavo.router import RouterRule, Score, check_choices
from octavo_jax.arrays.checks import as_count, check_count

SCORES: tuple[Score, ...] = get_args(Score)

RULE = tuple(field.name for field in fields(RouterRule))
"""The arguments of a router and of a block that say how it chooses."""

_FP32_MAX = float(np.finfo(np.float32).max)


def checked_rule(
    experts: int,
    k: int,
    *,
    score: Score = "softmax",
    groups: int = 1,
    kept_groups: int = 1,
    renormalize: bool = True,
    scale: float = 1.0,
) -> RouterRule:
    """The rule of these arguments of `choose_experts`; ValueError for those that do not fit so many experts."""
    k = as_count("k", k)
    check_score(score)
    if isinstance(scale, bool) or not isinstance(scale, int | float) or not abs(scale) <= _FP32_MAX:
        raise ValueError(f"scale is {scale!r}; give a finite number, in fp32, too")
    check_groups(experts, k, groups, kept_groups)
    if not isinstance(renormalize, bool):
        raise ValueError(f"renormalize is {renormalize!r}; give True or False")
    return RouterRule(k, score, groups, kept_groups, renormalize, float(scale))


def check_groups(experts: int, k: int, groups: int, kept_groups: int) -> None:
    """ValueError for groups that do not divide the experts, and for more choices than a token has."""
    check_count("groups", groups)
    check_count("kept_groups", kept_groups)
    check_choices(experts, k, groups, kept_groups)


def check_score(score: object) -> None:
    """ValueError for a score that there is none of."""
    one_of("score", score, SCORES)

"""RouterRule: how a MoE layer's router chooses experts, as a value; and what so many experts admit.

octavo_numerics.choose_experts defines bit for bit what each field does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Score = Literal["softmax", "sigmoid", "sqrtsoftplus"]


@dataclass(frozen=True, slots=True)
class RouterRule:
    """How a router chooses experts for each token, and what the choices weigh.

    k                     the number of choices: the experts with the largest score plus bias, the lower index among
                          equals. Without a bias and groups experts are ordered by their logits, because the scores of
                          two different logits may round to one number
    score                 how logits become scores: "softmax" over a token's experts, the others logit by logit
    groups, kept_groups   the experts are `groups` runs of equal length. A token's choices come from `kept_groups` of
                          them: those in which the two largest scores plus bias have the largest sum, the lower index
                          among equals
    renormalize           weights, which are the scores, are divided by their sum over a token's choices plus 1e-20
    scale                 multiplies the weights
    """

    k: int
    score: Score = "softmax"
    groups: int = 1
    kept_groups: int = 1
    renormalize: bool = True
    scale: float = 1.0

    @property
    def by_groups(self) -> bool:
        """Whether groups limit the choices, because some of them are left out."""
        return self.kept_groups < self.groups


def check_choices(experts: int, k: int, groups: int, kept_groups: int) -> None:
    """ValueError for numbers below 1, groups that do not divide the experts, and more choices than a token has."""
    for name, count in (("k", k), ("groups", groups), ("kept_groups", kept_groups)):
        if count < 1:
            raise ValueError(f"{name} is {count}; give at least 1")
    if experts % groups or kept_groups > groups:
        raise ValueError(
            f"groups is {groups}, kept_groups {kept_groups}, and there are {experts} experts; give a divisor of that "
            "number, and at most as many kept ones"
        )
    available = experts // groups * kept_groups
    if k > available:
        raise ValueError(
            f"k is {k} and a token has {available} of {experts} experts to choose from, as groups is {groups} and "
            f"kept_groups {kept_groups}; give at most that many"
        )

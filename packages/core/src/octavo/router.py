"""RouterRule: how a MoE layer's router chooses experts, as a value.

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

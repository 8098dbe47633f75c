"""A MoE layer's router as a value: what is chosen by. octavo_numerics.choose_experts defines what each field does."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Score = Literal["softmax", "sigmoid", "sqrtsoftplus"]


@dataclass(frozen=True, slots=True)
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

    @property
    def by_groups(self) -> bool:
        """Whether groups decide: some are left out."""
        return self.kept_groups < self.groups

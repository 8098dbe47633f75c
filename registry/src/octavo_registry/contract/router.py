"""The operations "choose_experts" and "choose_gradient": which experts each token goes to, and the way back.

octavo_numerics.choose_experts and choose_gradient define both, and bound what fp32 may be off by. Choices are exact:
where neither a bias nor groups decide, experts are ordered by their logits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Generic, Literal, Protocol

from octavo_registry.contract.arrays import A
from octavo_registry.contract.bound import Bound

Score = Literal["softmax", "sigmoid", "sqrtsoftplus"]


@dataclass(frozen=True, slots=True)
class RouterRule:
    """How a router chooses; octavo_numerics.RouterRule says what each field means.

    k                     choices of each token
    score                 of each logit
    groups, kept_groups   runs of experts of equal length, and of how many of them a token's choices come
    renormalize           whether weights are divided by their sum plus 1e-20
    scale                 multiplies the weights
    """

    k: int
    score: Score = "softmax"
    groups: int = 1
    kept_groups: int = 1
    renormalize: bool = True
    scale: float = 1.0


class ChooseExperts(Protocol[A]):
    """The choices of each token, their weights, and how many each expert got."""

    def __call__(self, logits: A, bias: A | None, replay: A | None, rule: RouterRule, /) -> tuple[A, A, A]:
        """(choices, weights, counts) of logits [T, E] in the request's in_dtype.

        bias     fp32 [E] or None, added to the scores for choosing alone
        replay   int64 [T, k] or None: choices to take; outside 0 to E - 1 is nobody's, and weighs 0
        choices  int64 [T, k], the largest first, ties to the lower index
        weights  fp32 [T, k]
        counts   int64 [E]
        """


class ChooseGradient(Protocol[A]):
    """The gradient of the logits; no order of threads shows in it."""

    def __call__(self, logits: A, choices: A, dweights: A, rule: RouterRule, /) -> A:
        """dlogits [T, E] in the logits' dtype, rounded once.

        choices   int64 [T, k], as `ChooseExperts` gave them
        dweights  fp32 [T, k]
        """


@dataclass(frozen=True, slots=True)
class BoundChooseExperts(Bound[ChooseExperts[A]], Generic[A]):
    """The answer to a request for "choose_experts": the function alone."""


@dataclass(frozen=True, slots=True)
class BoundChooseGradient(Bound[ChooseGradient[A]], Generic[A]):
    """The answer to a request for "choose_gradient": the function alone."""


AnyBoundRouter = BoundChooseExperts[Any] | BoundChooseGradient[Any]

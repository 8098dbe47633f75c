"""The operations of a router, "choose_experts" and "choose_gradient", and those of rows that follow its choices:
"route", "permute_rows", "combine_rows" and "dot_rows".

T tokens with k choices each are T k rows. Each of the last three operations is linear in each operand, and the other
two are its derivatives, so the four serve forward and backward. No order of threads shows in a result.

A MoE layer over several ranks knows how many rows are routed at most, and moves those and one more, M in all: `order`
is then [M], and `position` of every choice that is routed nowhere is M - 1, past the sum of the sizes. It also combines
rows of buffers that have more places than it has choices, M > T k. `Route` never makes such places.

Integers are int64, and int32 in JAX, which has no int64 unless it is turned on.

octavo_numerics.choose_experts and choose_gradient define the first two, and bound what fp32 may be off by. Choices are
exact: where neither a bias nor groups decide, experts are ordered by their logits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, Protocol

from octavo.router import RouterRule
from octavo_registry.contract.arrays import A
from octavo_registry.contract.bound import Bound
from octavo_registry.contract.cards import Move


class Route(Protocol[A]):
    """Sorts a router's choices by group, stably."""

    def __call__(self, expert_index: A, groups: int, /) -> tuple[A, A, A, A]:
        """(group_sizes, order, position, routed) of expert_index [T, k].

        group_sizes  int64 [G]
        order        int64 [T k], the choice of each row
        position     int64 [T, k], the inverse of `order`: the row of each choice
        routed       bool [T, k]; False where the number is outside 0 to groups - 1, whose rows come last
        """


class PermuteRows(Protocol[A]):
    """rows[position[t, j]] is weights[t, j] x[t], or x[t] without weights."""

    def __call__(self, x: A, order: A, position: A, routed: A, weights: A | None, /) -> A:
        """rows [T k, H] in x's dtype, rounded once; zero where a choice is routed nowhere.

        x        [T, H]
        weights  fp32 [T, k] or None

        With fewer places, rows [M, H], of which those past the sum of the sizes may hold anything.

        The other arguments are the results of `Route`.
        """


class TokenRows(NamedTuple, Generic[A]):
    """The rows that `PermuteRows` would write of tokens without weights, where these stand: an operand of GEMMs.

    tokens  [T, H]; of a GEMM that reads codes, the GroupedTensor of them as one matrix [1, T, H] in the plain layout,
            of which it reads the row data

    The others are the results of `Route`. There are as many rows as `order` has numbers.
    """

    tokens: A | Any
    order: A
    position: A
    routed: A


class CombineRows(Protocol[A]):
    """y[t] is the sum over j of weights[t, j] rows[position[t, j]], or of the rows without weights."""

    def __call__(self, rows: A, position: A, routed: A, weights: A | None, /) -> A:
        """y [T, H] in the dtype of rows: summed in fp32 in the order of j, rounded once.

        rows     [T k, H], or [M, H] of M other places
        weights  fp32 [T, k] or None

        Choices that are routed nowhere add nothing.
        """


class DotRows(Protocol[A]):
    """products[t, j] is rows[position[t, j]] . dy[t], the gradient of the weights."""

    def __call__(self, rows: A, dy: A, position: A, routed: A, /) -> A:
        """fp32 products [T, k], zero where a choice is routed nowhere.

        rows  [T k, H]
        dy    [T, H]
        """


@dataclass(frozen=True, slots=True)
class BoundRoute(Bound[Route[A]], Generic[A]):
    """The answer to a request for "route": the function alone."""


@dataclass(frozen=True, slots=True)
class BoundPermuteRows(Bound[PermuteRows[A]], Generic[A]):
    """The answer to a request for "permute_rows": the function alone."""


@dataclass(frozen=True, slots=True)
class BoundCombineRows(Bound[CombineRows[A]], Generic[A]):
    """The answer to a request for "combine_rows": the function alone."""


@dataclass(frozen=True, slots=True)
class BoundDotRows(Bound[DotRows[A]], Generic[A]):
    """The answer to a request for "dot_rows": the function alone."""


AnyBoundMove = BoundRoute[Any] | BoundPermuteRows[Any] | BoundCombineRows[Any] | BoundDotRows[Any]


class MoveFunctions(Protocol):
    """The functions of a backend that serves all four, by the operations' names: a module has them."""

    @property
    def route(self) -> Route[Any]: ...

    @property
    def permute_rows(self) -> PermuteRows[Any]: ...

    @property
    def combine_rows(self) -> CombineRows[Any]: ...

    @property
    def dot_rows(self) -> DotRows[Any]: ...


def bound_move(op: Move, functions: MoveFunctions) -> AnyBoundMove:
    """The answer to a request for one of them."""
    if op == "route":
        return BoundRoute(functions.route)
    if op == "permute_rows":
        return BoundPermuteRows(functions.permute_rows)
    return BoundCombineRows(functions.combine_rows) if op == "combine_rows" else BoundDotRows(functions.dot_rows)


# ---- the router itself


class ChooseExperts(Protocol[A]):
    """The choices of each token, their weights, and how many each expert got."""

    def __call__(self, logits: A, bias: A | None, replay: A | None, rule: RouterRule, /) -> tuple[A, A, A]:
        """(choices, weights, counts) of logits [T, E] in the request's in_dtype.

        bias     fp32 [E] or None, added to the scores for choosing alone
        replay   int64 [T, k] or None: choices to take; outside 0 to E - 1 is nobody's, and weighs 0
        choices  int64 [T, k], the largest first, NaN before all, ties to the lower index
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

"""The operations "route", "permute_rows", "combine_rows" and "dot_rows": a router's choices, and rows that follow them.

T tokens with k choices each are T k rows. Each of the last three operations is linear in each operand, and the other
two are its derivatives, so the four serve forward and backward. No order of threads shows in a result.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Generic, Protocol

from octavo_registry.contract.arrays import A
from octavo_registry.contract.bound import Bound


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

        The other arguments are the results of `Route`.
        """


class CombineRows(Protocol[A]):
    """y[t] is the sum over j of weights[t, j] rows[position[t, j]], or of the rows without weights."""

    def __call__(self, rows: A, position: A, routed: A, weights: A | None, /) -> A:
        """y [T, H] in the dtype of rows: summed in fp32 in the order of j, rounded once.

        rows     [T k, H]
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

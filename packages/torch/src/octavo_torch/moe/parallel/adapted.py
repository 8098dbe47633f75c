"""Experts over ranks with adapters: dispatch, whatever runs on their rows, and combine, each an operation of autograd.

Forward:   tokens and weights -> dispatch -> rows of this rank's experts  ->  experts  ->  rows -> combine -> tokens
Backward:  dy -> dispatch -> rows  ->  the experts' gradients  ->  rows -> combine -> dx and the weights' gradients
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from octavo_torch.arrays.checks import HashableNames
from octavo_torch.compiler.autograd_context import AutogradContext
from octavo_torch.compiler.refused_derivatives import FirstOrderFunction, check_no_graph
from octavo_torch.moe.parallel.exchange_for_call import beside_graph
from octavo_torch.moe.parallel.token_exchange import TokenExchange
from octavo_torch.moe.rows.derivatives import Places
from octavo_torch.moe.rows.moves import Moves, moves_for, route_for


class _Trip:
    """One token_exchange, and where it has put the rows of this rank's experts.

    sizes, places   int [G] and Places of the rows, from `depart` on
    """

    def __init__(self, token_exchange: TokenExchange, groups: int, backend: HashableNames) -> None:
        self.token_exchange, self._groups, self.backend = token_exchange, groups, backend
        self.sizes: Tensor
        self.places: Places

    def depart(self, x: Tensor, weights: Tensor, choices: Tensor) -> tuple[Tensor, Tensor]:
        """Rows [M, K] and fp32 [M], what each counts."""
        underway = self.token_exchange.dispatch(x, weights, choices)
        there, weights = underway.choices()
        sizes, *parts = route_for(x, self._groups, self.backend)(there, self._groups)
        self.sizes, self.places = self.token_exchange.bound(sizes, Places(*parts))
        rows = moves_for(x, self.backend).permute_rows(underway.tokens(), *self.places, None)
        values = weights.reshape(-1, 1)
        probs = moves_for(values, self.backend).permute_rows(values, *self._by_choice(), None)
        return rows, probs.view(-1)

    def combine_weights(self, dprobs: Tensor) -> Tensor:
        """The gradient of the choices' weights, fp32 [T, k]."""
        values = dprobs.float()[:, None]
        _, position, routed = self._by_choice()
        by_choice = moves_for(values, self.backend).combine_rows(values, position, routed, None)
        return self.token_exchange.combine_weights(by_choice.view(self.places.position.shape))

    def moves(self, rows: Tensor) -> Moves:
        """Of rows like these."""
        return moves_for(rows, self.backend)

    def _by_choice(self) -> Places:
        """Each choice as a token with one choice."""
        order, position, routed = self.places
        return Places(order, position.view(-1, 1), routed.view(-1, 1))


class _Context(AutogradContext, Protocol):
    trip: _Trip
    dtype: torch.dtype


class _Away(FirstOrderFunction):
    """Tokens and their choices' weights to rows of this rank's experts."""

    @staticmethod
    def forward(ctx: _Context, x: Tensor, weights: Tensor, choices: Tensor, trip: _Trip) -> tuple[Tensor, Tensor]:
        """Rows and probs. The experts compute no gradient of what nothing asks for, whose dy would be recorded and draw
        a seed."""
        ctx.trip, ctx.dtype = trip, weights.dtype
        made = trip.depart(x, weights, choices)
        ctx.mark_non_differentiable(*(one for one, asked in zip(made, ctx.needs_input_grad, strict=False) if not asked))
        return made

    @staticmethod
    def backward(ctx: _Context, drows: Tensor, dprobs: Tensor) -> tuple[Tensor | None, ...]:
        """Each choice's row back, summed at home; what is not asked for stays on every rank."""
        check_no_graph(drows)
        trip, (need_x, need_weights, *_) = ctx.trip, ctx.needs_input_grad
        with torch.no_grad():
            dx = trip.token_exchange.combine(trip.moves(drows), drows, trip.places)() if need_x else None
            dweights = trip.combine_weights(dprobs).to(ctx.dtype) if need_weights else None
        return dx, dweights, None, None


class _Home(FirstOrderFunction):
    """Rows of this rank's experts to the sums of the tokens that they are of."""

    @staticmethod
    def forward(ctx: _Context, rows: Tensor, trip: _Trip) -> Tensor:
        """y [T, N]."""
        ctx.trip = trip
        return trip.token_exchange.combine(trip.moves(rows), rows, trip.places)()

    @staticmethod
    def backward(ctx: _Context, dy: Tensor) -> tuple[Tensor, None]:
        """The rows of dy."""
        check_no_graph(dy)
        with torch.no_grad():
            arrived = ctx.trip.token_exchange.dispatch_gradient(dy)()
            return ctx.trip.moves(arrived).permute_rows(arrived, *ctx.trip.places, None), None


@beside_graph
def through_ranks(
    routed: tuple[Tensor, Tensor, Tensor],
    groups: int,
    experts: Callable[[Tensor, Tensor, Tensor], Tensor],
    token_exchange: Callable[[], TokenExchange],
    *,
    recompute: bool = False,
    backend: HashableNames = None,
) -> Tensor:
    """y [T, N]: dispatch, `experts(rows, sizes, probs)` of this rank's `groups` experts, and combine.

    routed           tokens [T, K], choices [T, k] among all experts, and weights [T, k]
    token_exchange   makes the one of this call
    recompute        the backward runs the experts again, of their rows: no token travels twice
    """
    x, choices, weights = routed
    trip = _Trip(token_exchange(), groups, backend)
    rows, probs = _Away.apply(x, weights, choices, trip)  # type: ignore[no-untyped-call]
    if recompute and torch.is_grad_enabled():
        made: Tensor = checkpoint(experts, rows, trip.sizes, probs, use_reentrant=False)
    else:
        made = experts(rows, trip.sizes, probs)
    y: Tensor = _Home.apply(made, trip)  # type: ignore[no-untyped-call]
    return y

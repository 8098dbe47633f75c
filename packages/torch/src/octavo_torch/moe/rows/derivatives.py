"""Derivatives of the three row moves. Each is linear in each operand, so at any order they are one another's."""

from __future__ import annotations

from typing import NamedTuple, NoReturn, Protocol

import torch
from torch import Tensor
from torch.autograd import forward_ad

from octavo_torch.autograd.saved_tensors import save, saved_tensors
from octavo_torch.compiler.autograd_context import AutogradContext
from octavo_torch.compiler.recorders import check_not_recorded
from octavo_torch.compiler.refused_derivatives import check_no_tangent
from octavo_torch.compiler.transforms import Subject, check_transform, no_transform, transforms_active
from octavo_torch.moe.rows.moves import Moves

ROWS = Subject("permute or unpermute", "tokens are their own batch: give all of them in one call")


class Places(NamedTuple):
    """Where rows go: `order` [M], `position` [T, k] and `routed` [T, k] of permutation.Routing."""

    order: Tensor
    position: Tensor
    routed: Tensor


class _Context(AutogradContext, Protocol):
    moves: Moves


class _Permute(torch.autograd.Function):
    """rows[position[t, j]] = weights[t, j] x[t], or x[t]."""

    @staticmethod
    def forward(ctx: _Context, x: Tensor, weights: Tensor | None, places: Places, moves: Moves) -> Tensor:
        save(ctx, x if ctx.needs_input_grad[1] else None, weights, *places)
        ctx.moves = moves
        return moves.permute_rows(x, *places, weights)

    @staticmethod
    def backward(ctx: _Context, drows: Tensor) -> tuple[Tensor | None, ...]:
        x, weights, *places_saved = saved_tensors(ctx)
        places = Places(*places_saved)
        dx = combine(drows, weights, places, ctx.moves) if ctx.needs_input_grad[0] else None
        dweights = dot(drows, x, places, ctx.moves) if ctx.needs_input_grad[1] else None
        return dx, dweights, None, None


class _Combine(torch.autograd.Function):
    """y[t] = sum over j of weights[t, j] rows[position[t, j]], or of the rows."""

    @staticmethod
    def forward(ctx: _Context, rows: Tensor, weights: Tensor | None, places: Places, moves: Moves) -> Tensor:
        save(ctx, rows if ctx.needs_input_grad[1] else None, weights, *places)
        ctx.moves = moves
        return moves.combine_rows(rows, places.position, places.routed, weights)

    @staticmethod
    def backward(ctx: _Context, dy: Tensor) -> tuple[Tensor | None, ...]:
        rows, weights, *places_saved = saved_tensors(ctx)
        places = Places(*places_saved)
        drows = permute(dy, weights, places, ctx.moves) if ctx.needs_input_grad[0] else None
        dweights = dot(rows, dy, places, ctx.moves) if ctx.needs_input_grad[1] else None
        return drows, dweights, None, None


class _Dot(torch.autograd.Function):
    """products[t, j] = rows[position[t, j]] . dy[t]."""

    @staticmethod
    def forward(ctx: _Context, rows: Tensor, dy: Tensor, places: Places, moves: Moves) -> Tensor:
        save(ctx, rows, dy, *places)
        ctx.moves = moves
        return moves.dot_rows(rows, dy, places.position, places.routed)

    @staticmethod
    def backward(ctx: _Context, grad: Tensor) -> tuple[Tensor | None, ...]:
        rows, dy, *places_saved = saved_tensors(ctx)
        places = Places(*places_saved)
        drows = permute(dy, grad, places, ctx.moves) if ctx.needs_input_grad[0] else None
        ddy = combine(rows, grad, places, ctx.moves) if ctx.needs_input_grad[1] else None
        return drows, ddy, None, None


class _InTransform:
    """What torch.func.grad needs of each of the three.

    Other calls do without it, because torch would inspect a signature in each of them.
    """

    @staticmethod
    def setup_context(ctx: _Context, inputs: tuple[Tensor, Tensor | None, Places, Moves], output: Tensor) -> None:
        first, second, places, ctx.moves = inputs
        save(ctx, first, second, *places)

    @staticmethod
    def vmap(*_: object) -> NoReturn:
        raise no_transform("vmap", ROWS)


class _PermuteInTransform(_InTransform, _Permute):
    @staticmethod
    def forward(x: Tensor, weights: Tensor | None, places: Places, moves: Moves) -> Tensor:  # type: ignore[override]
        return moves.permute_rows(x, *places, weights)


class _CombineInTransform(_InTransform, _Combine):
    @staticmethod
    def forward(rows: Tensor, weights: Tensor | None, places: Places, moves: Moves) -> Tensor:  # type: ignore[override]
        return moves.combine_rows(rows, places.position, places.routed, weights)


class _DotInTransform(_InTransform, _Dot):
    @staticmethod
    def forward(rows: Tensor, dy: Tensor, places: Places, moves: Moves) -> Tensor:  # type: ignore[override]
        return moves.dot_rows(rows, dy, places.position, places.routed)


def check_contexts(*operands: Tensor | None) -> None:
    """Raises NotImplementedError inside transforms other than torch.func.grad, for an operand with a tangent, and where
    a recorder sees no kernels."""
    check_not_recorded(operands)
    if transforms_active():
        check_transform(ROWS)
    if forward_ad._current_level >= 0:
        check_no_tangent(*operands, name=ROWS.name)


def permute(x: Tensor, weights: Tensor | None, places: Places, moves: Moves) -> Tensor:
    """moves.permute_rows, differentiable in x and fp32 weights."""
    function = _PermuteInTransform if transforms_active() else _Permute
    rows: Tensor = function.apply(x, weights, places, moves)  # type: ignore[no-untyped-call]
    return rows


def combine(rows: Tensor, weights: Tensor | None, places: Places, moves: Moves) -> Tensor:
    """moves.combine_rows, differentiable in rows and fp32 weights; rows are saved where weights need a gradient."""
    function = _CombineInTransform if transforms_active() else _Combine
    y: Tensor = function.apply(rows, weights, places, moves)  # type: ignore[no-untyped-call]
    return y


def dot(rows: Tensor, dy: Tensor, places: Places, moves: Moves) -> Tensor:
    """moves.dot_rows, differentiable in both."""
    function = _DotInTransform if transforms_active() else _Dot
    products: Tensor = function.apply(rows, dy, places, moves)  # type: ignore[no-untyped-call]
    return products

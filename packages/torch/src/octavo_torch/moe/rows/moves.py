"""Chooses the functions of a router, and those that route choices and move rows: a backend's, where one serves them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from octavo.router import RouterRule
from octavo_registry import plan_if_served
from octavo_registry.contract import moves as contract
from octavo_registry.contract.cards import Move
from octavo_registry.contract.moves import ChooseExperts, ChooseGradient
from octavo_registry.contract.request import ChooseRequest, MoveRequest
from octavo_torch.arrays.checks import HashableNames
from octavo_torch.arrays.dtypes import DTYPE_NAMES
from octavo_torch.compiler.graphs import wants_graph
from octavo_torch.dispatch.device import arch_of
from octavo_torch.memo import Memo
from octavo_torch.moe.rows import operators

Run = Callable[..., Any]

_FALLBACKS: dict[Move, Run] = {
    "route": operators.route,
    "permute_rows": operators.permute_rows,
    "combine_rows": operators.combine_rows,
    "dot_rows": operators.dot_rows,
}
_MOVES: tuple[Move, ...] = ("permute_rows", "combine_rows", "dot_rows")


class _Served(NamedTuple):
    """A function, and the name of its backend; of torch's operations, an empty one."""

    run: Run
    backend: str


_functions: Memo[_Served] = Memo()


class Moves(NamedTuple):
    """The functions that move rows of one dtype on one device; octavo_registry.contract.moves describes them.

    backends   the names of those that serve them; torch's operations have an empty one
    """

    permute_rows: contract.PermuteRows[Tensor]
    combine_rows: contract.CombineRows[Tensor]
    dot_rows: contract.DotRows[Tensor]
    backends: frozenset[str]


class MoveSet(NamedTuple):
    """What a MoE layer moves: `route` routes its choices, and the others move rows of tokens, of results and of the
    choices' weights.

    backends   the names of those that serve them, as in Moves
    """

    route: contract.Route[Tensor]
    tokens: Moves
    results: Moves
    weights: Moves
    backends: frozenset[str]


class Choosers(NamedTuple):
    """The functions of a router; octavo_registry.contract.moves describes them."""

    choose: ChooseExperts[Tensor]
    gradient: ChooseGradient[Tensor]


_choosers: Memo[Choosers | None] = Memo()
_moves: Memo[Moves] = Memo()
_sets: Memo[MoveSet] = Memo()


def choosers_for(logits: Tensor, rule: RouterRule, backend: HashableNames) -> Choosers | None:
    """Those of the backend that serves both; None: torch's operations, composed. A backward uses forward's."""
    graph_safe = wants_graph(logits)
    experts = int(logits.shape[1])
    key = (logits.dtype, logits.device, experts, rule.k, rule.groups, rule.kept_groups, backend, graph_safe)
    return _choosers.get(key, lambda: _resolve_choosers(logits, rule, backend, graph_safe))


def _resolve_choosers(logits: Tensor, rule: RouterRule, backend: HashableNames, graph_safe: bool) -> Choosers | None:
    request = choose_request(logits, rule, graph_safe)
    plan = plan_if_served(request, backend=backend)
    back = None if plan is None else plan_if_served(replace(request, op="choose_gradient"), backend=plan.backend)
    return None if plan is None or back is None else Choosers(plan.run, back.run)


def choose_request(logits: Tensor, rule: RouterRule, graph_safe: bool) -> ChooseRequest:
    """What is asked for to choose experts by `logits` [T, E]."""
    name = DTYPE_NAMES[logits.dtype]
    return ChooseRequest(
        op="choose_experts",
        framework="torch",
        device=logits.device.type,
        in_dtype=name,
        out_dtype=name,
        arch=arch_of(logits.device),
        groups=int(logits.shape[1]),
        graph_safe=graph_safe,
        choices=rule.k,
        expert_groups=rule.groups if rule.by_groups else 1,
    )


def moves_for(x: Tensor, backend: HashableNames) -> Moves:
    """Moves for rows like `x`. A backward uses forward's, because its thread does not see `octavo_registry.prefer`."""
    return _moves.get((x.dtype, x.device, backend, wants_graph(x)), lambda: _resolve_moves(x, backend))


def _resolve_moves(x: Tensor, backend: HashableNames) -> Moves:
    permute, combine, dot = (_function(op, x, backend) for op in _MOVES)
    return Moves(permute.run, combine.run, dot.run, frozenset({permute.backend, combine.backend, dot.backend}))


def route_for(x: Tensor, groups: int, backend: HashableNames) -> contract.Route[Tensor]:
    """The function that routes tokens `x` to `groups`."""
    route: contract.Route[Tensor] = _function("route", x, backend, groups).run
    return route


def move_set_for(x: Tensor, row_dtype: torch.dtype, groups: int, backend: HashableNames) -> MoveSet:
    """Those of a MoE layer with tokens `x`, whose results have `row_dtype`, and fp32 weights."""
    key = (x.dtype, x.device, row_dtype, groups, backend, wants_graph(x))
    return _sets.get(key, lambda: _resolve_set(x, row_dtype, groups, backend))


def _resolve_set(x: Tensor, row_dtype: torch.dtype, groups: int, backend: HashableNames) -> MoveSet:
    route = _function("route", x, backend, groups)
    likes = x, x.new_empty(0, dtype=row_dtype), x.new_empty(0, dtype=torch.float32)
    tokens, results, weights = (moves_for(like, backend) for like in likes)
    backends = tokens.backends | results.backends | weights.backends | {route.backend}
    return MoveSet(route.run, tokens, results, weights, backends)


def _function(op: Move, x: Tensor, backend: HashableNames, groups: int | None = None) -> _Served:
    graph_safe = wants_graph(x)
    key = (op, x.dtype, x.device, backend, groups, graph_safe)
    return _functions.get(key, lambda: _resolve(op, x, backend, groups, graph_safe))


def _resolve(op: Move, x: Tensor, backend: HashableNames, groups: int | None, graph_safe: bool) -> _Served:
    plan = plan_if_served(move_request(op, x, groups, graph_safe), backend=backend)
    return _Served(_FALLBACKS[op], "") if plan is None else _Served(plan.run, plan.backend)


def move_request(op: Move, x: Tensor, groups: int | None, graph_safe: bool) -> MoveRequest:
    """What is asked for to move rows like `x`; `groups`: of "route"."""
    name = DTYPE_NAMES[x.dtype]
    return MoveRequest(
        op=op,
        framework="torch",
        device=x.device.type,
        in_dtype=name,
        out_dtype=name,
        arch=arch_of(x.device),
        groups=groups,
        graph_safe=graph_safe,
    )

"""The operators of routing and of moves: their schemas for every backend, and the front end's own, composed in torch.

octavo_registry.contract.moves has the calls. The front end's are used where no backend serves them. They are custom
operators, so that bits do not depend on how a compiler orders sums, and each result gathers what it is made of, so that
no sum depends on an order of threads.
`order` [M], `position` [T, k] and `routed` [T, k] are those of permutation.Routing.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from octavo.router import RouterRule
from octavo_torch.compiler.operators import Operators


def _route(expert_index: Tensor, groups: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    flat = expert_index.reshape(-1).to(torch.int64)
    routed = (flat >= 0) & (flat < groups)
    keys, order = torch.sort(torch.where(routed, flat, groups).to(torch.int32), stable=True)
    ends = torch.searchsorted(keys, torch.arange(groups, dtype=torch.int32, device=keys.device), right=True)
    position = torch.empty_like(order).scatter_(0, order, torch.arange(order.shape[0], device=order.device))
    shape = expert_index.shape
    return torch.diff(ends, prepend=ends.new_zeros(1)), order, position.view(shape), routed.view(shape)


def _route_fake(expert_index: Tensor, groups: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:

    def integers(*shape: int) -> Tensor:
        return expert_index.new_empty(shape, dtype=torch.int64)

    position = integers(*expert_index.shape)
    order = integers(expert_index.numel())
    return integers(groups), order, position, expert_index.new_empty(expert_index.shape, dtype=torch.bool)


def _permute_rows(x: Tensor, order: Tensor, position: Tensor, routed: Tensor, weights: Tensor | None) -> Tensor:
    # sorted: choices that are routed nowhere are at the end
    live = torch.arange(order.shape[0], device=order.device) < routed.sum()
    tokens = order // routed.shape[1]
    if weights is None:
        # reading an added row of zeros costs one row; overwriting rows afterwards would cost a pass over all of them
        padded = pad(x, (0, 0, 0, 1))
        return padded.index_select(0, torch.where(live, tokens, x.shape[0]))
    rows = x.index_select(0, tokens).float() * weights.reshape(-1).index_select(0, order)[:, None]
    return torch.where(live[:, None], rows, 0).to(x.dtype)


def _permute_fake(x: Tensor, order: Tensor, *_: Tensor | None) -> Tensor:
    return x.new_empty((order.shape[0], x.shape[1]))


def _combine_rows(rows: Tensor, position: Tensor, routed: Tensor, weights: Tensor | None) -> Tensor:
    total = torch.zeros((position.shape[0], rows.shape[1]), dtype=torch.float32, device=rows.device)
    for choice in range(position.shape[1]):
        part = rows.index_select(0, position[:, choice])
        if weights is not None:
            part = part * weights[:, choice, None]
        # after the product: neither a row nor a weight of nobody's choice adds anything
        total += torch.where(routed[:, choice, None], part, 0)
    return total.to(rows.dtype)


def _combine_fake(rows: Tensor, position: Tensor, *_: Tensor | None) -> Tensor:
    return rows.new_empty((position.shape[0], rows.shape[1]))


def _dot_rows(rows: Tensor, dy: Tensor, position: Tensor, routed: Tensor) -> Tensor:
    wide = dy.float()
    columns = [(rows.index_select(0, position[:, choice]) * wide).sum(1) for choice in range(position.shape[1])]
    return torch.where(routed, torch.stack(columns, 1), 0.0)


def _dot_fake(rows: Tensor, dy: Tensor, position: Tensor, routed: Tensor) -> Tensor:
    return rows.new_empty(position.shape, dtype=torch.float32)


class OperatorForm(NamedTuple):
    """What every operator of one operation has in common, whichever backend defines it.

    schema   of torch.library
    fake     shapes and dtypes of the results
    """

    schema: str
    fake: Callable[..., Any]


MOVE_OPERATORS: Mapping[str, OperatorForm] = {
    "route": OperatorForm("route(Tensor index, int groups) -> (Tensor, Tensor, Tensor, Tensor)", _route_fake),
    "permute_rows": OperatorForm(
        "permute_rows(Tensor x, Tensor order, Tensor position, Tensor routed, Tensor? weights) -> Tensor", _permute_fake
    ),
    "combine_rows": OperatorForm(
        "combine_rows(Tensor rows, Tensor position, Tensor routed, Tensor? weights) -> Tensor", _combine_fake
    ),
    "dot_rows": OperatorForm("dot_rows(Tensor rows, Tensor dy, Tensor position, Tensor routed) -> Tensor", _dot_fake),
}
"""The operators that route and move rows, by the names of their operations."""


@lru_cache(maxsize=1024)
def rule_text(rule: RouterRule) -> str:
    """`rule` as JSON: operators' schemas take text."""
    return json.dumps(asdict(rule))


@lru_cache(maxsize=1024)
def rule_from(text: str) -> RouterRule:
    """The rule that `rule_text` wrote."""
    return RouterRule(**json.loads(text))


def _choose_fake(logits: Tensor, bias: Tensor | None, replay: Tensor | None, rule: str) -> tuple[Tensor, ...]:
    shape = (logits.shape[0], rule_from(rule).k)
    counts = logits.new_empty((logits.shape[1],), dtype=torch.int64)
    return logits.new_empty(shape, dtype=torch.int64), logits.new_empty(shape, dtype=torch.float32), counts


CHOOSE_OPERATORS: Mapping[str, OperatorForm] = {
    "choose_experts": OperatorForm(
        "choose_experts(Tensor logits, Tensor? bias, Tensor? replay, str rule) -> (Tensor, Tensor, Tensor)",
        _choose_fake,
    ),
    "choose_gradient": OperatorForm(
        "choose_gradient(Tensor logits, Tensor choices, Tensor dweights, str rule) -> Tensor",
        lambda logits, *_: logits.new_empty(logits.shape),
    ),
}
"""The operators of a router, by the names of their operations; `rule_from` reads the last argument.

They have no implementation here: where no backend serves them, router.py computes the same in torch's own operations,
which autograd differentiates.
"""

_define = Operators("octavo_torch").define


def _defined(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    return _define(MOVE_OPERATORS[name].schema, function, MOVE_OPERATORS[name].fake)


route = _defined("route", _route)
permute_rows = _defined("permute_rows", _permute_rows)
combine_rows = _defined("combine_rows", _combine_rows)
dot_rows = _defined("dot_rows", _dot_rows)

"""The gathers behind permute and unpermute, as custom operators: bits do not depend on how a compiler orders sums.

`order` [M], `position` [T, k] and `routed` [T, k] are those of permutation.Routing.
"""

from __future__ import annotations

import torch
from torch import Tensor

from octavo_torch.operators import Operators


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


def _gather_rows(x: Tensor, scales: Tensor | None, order: Tensor, routed: Tensor, dtype: torch.dtype) -> Tensor:
    """Row r is scales[order[r]] * x[order[r] // k], zero where that choice is routed nowhere."""
    # sorted, those that are routed nowhere stand at the end
    live = torch.arange(order.shape[0], device=order.device) < routed.sum()
    tokens = order // routed.shape[1]
    if scales is None:
        # a row of zeros to read costs one row; to overwrite rows afterwards costs a pass over all of them
        padded = torch.cat((x, x.new_zeros((1, x.shape[1]))))
        return padded.index_select(0, torch.where(live, tokens, x.shape[0])).to(dtype)
    rows = x.index_select(0, tokens).float() * scales.reshape(-1).float().index_select(0, order)[:, None]
    return torch.where(live[:, None], rows, 0).to(dtype)


def _sum_rows(rows: Tensor, weights: Tensor | None, position: Tensor, routed: Tensor, dtype: torch.dtype) -> Tensor:
    """y[t] = sum over j of weights[t, j] * rows[position[t, j]] where routed, in fp32."""
    if rows.is_cuda and weights is None and rows.dtype is dtype and rows.numel():
        return _sum_bags(rows, position, routed)
    total = torch.zeros((position.shape[0], rows.shape[1]), dtype=torch.float32, device=rows.device)
    for choice in range(position.shape[1]):
        part = rows.index_select(0, position[:, choice])
        part = torch.where(routed[:, choice, None], part, 0)
        if weights is None:
            total += part
        else:
            total += part * weights[:, choice, None].float()
    return total.to(dtype)


def _sum_bags(rows: Tensor, position: Tensor, routed: Tensor) -> Tensor:
    """The same for plain sums in one pass: on a GPU torch's embedding_bag adds a bag's rows in fp32, in order."""
    tokens, count = position.shape[0], position.numel()
    flat = routed.reshape(-1).to(torch.int64)
    before, live = torch.cumsum(flat, 0) - flat, flat.sum()
    # rows of the routed choices, token by token; the bags behind them are for the rest of this tensor, which is zeros
    indices = position.new_zeros(count + 1)
    indices.scatter_(0, torch.where(flat > 0, before, count), position.reshape(-1))
    others = max(1, tokens // 8)
    behind = live + torch.arange(others, device=rows.device) * -(-count // others)
    starts = torch.cat((before[:: position.shape[1]], behind.clamp_max(count)))
    summed: Tensor = torch.embedding_bag(rows, indices[:count], starts, mode=0)[0]
    return summed[:tokens]


def _dot_rows(rows: Tensor, dy: Tensor, position: Tensor, routed: Tensor) -> Tensor:
    """fp32 [T, k]: dy[t] . rows[position[t, j]], zero where routed nowhere."""
    wide = dy.float()
    columns = [(rows.index_select(0, position[:, choice]) * wide).sum(1) for choice in range(position.shape[1])]
    return torch.where(routed, torch.stack(columns, 1), 0.0)


def _weights_to_rows(weights: Tensor, order: Tensor, routed: Tensor) -> Tensor:
    """fp32 [M]: the weight of each row's choice, zero past the sum."""
    live = torch.arange(order.shape[0], device=order.device) < routed.sum()
    return torch.where(live, weights.reshape(-1).float().index_select(0, order), 0.0)


def _rows_to_weights(values: Tensor, position: Tensor, routed: Tensor) -> Tensor:
    """fp32 [T, k]: the value of each choice's row, zero where routed nowhere."""
    return torch.where(routed, values.index_select(0, position.reshape(-1)).view(position.shape), 0.0)


_define = Operators("octavo_torch").define
route = _define("route(Tensor index, int groups) -> (Tensor, Tensor, Tensor, Tensor)", _route, _route_fake)
gather_rows = _define(
    "gather_rows(Tensor x, Tensor? scales, Tensor order, Tensor routed, ScalarType dtype) -> Tensor",
    _gather_rows,
    lambda x, scales, order, routed, dtype: x.new_empty((order.shape[0], x.shape[1]), dtype=dtype),
)
sum_rows = _define(
    "sum_rows(Tensor rows, Tensor? weights, Tensor position, Tensor routed, ScalarType dtype) -> Tensor",
    _sum_rows,
    lambda rows, weights, position, routed, dtype: rows.new_empty((position.shape[0], rows.shape[1]), dtype=dtype),
)
dot_rows = _define(
    "dot_rows(Tensor rows, Tensor dy, Tensor position, Tensor routed) -> Tensor",
    _dot_rows,
    lambda rows, dy, position, routed: rows.new_empty(position.shape, dtype=torch.float32),
)
weights_to_rows = _define(
    "weights_to_rows(Tensor weights, Tensor order, Tensor routed) -> Tensor",
    _weights_to_rows,
    lambda weights, order, routed: weights.new_empty(order.shape, dtype=torch.float32),
)
rows_to_weights = _define(
    "rows_to_weights(Tensor values, Tensor position, Tensor routed) -> Tensor",
    _rows_to_weights,
    lambda values, position, routed: values.new_empty(position.shape, dtype=torch.float32),
)

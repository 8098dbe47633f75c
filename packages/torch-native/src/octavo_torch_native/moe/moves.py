"""Routing and moved rows: the bound functions of octavo_registry.contract.moves, one launch each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import octavo_native
from octavo_torch.plugin_api import MOVE_OPERATORS
from octavo_torch_native.arrays.launch import address, as_rows, submit
from octavo_torch_native.arrays.operators import define
from octavo_torch_native.quantizers.planes import DTYPE_NUMBERS


def _route(expert_index: Tensor, groups: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    index = expert_index.to(torch.int64).contiguous()
    sizes, order, position, routed = MOVE_OPERATORS["route"].fake(index, groups)
    workspace = octavo_native.route_workspace(index.numel(), groups) if index.is_cuda else 0
    counts = index.new_empty(workspace // 4, dtype=torch.int32) if workspace else None
    arguments = {
        "index": address(index),
        "choices": index.numel(),
        "groups": groups,
        "group_sizes": address(sizes),
        "order": address(order),
        "position": address(position),
        "routed": address(routed),
        "counts": address(counts),
    }
    submit(octavo_native.route, index, arguments, threaded=False)
    return sizes, order, position, routed


def _permute_rows(x: Tensor, order: Tensor, position: Tensor, routed: Tensor, weights: Tensor | None) -> Tensor:
    rows: Tensor = MOVE_OPERATORS["permute_rows"].fake(x, order)
    _move(octavo_native.permute_rows, rows.shape[0], x, (position, routed, weights), rows)
    return rows


def _combine_rows(rows: Tensor, position: Tensor, routed: Tensor, weights: Tensor | None) -> Tensor:
    y: Tensor = MOVE_OPERATORS["combine_rows"].fake(rows, position)
    _move(octavo_native.combine_rows, rows.shape[0], rows, (position, routed, weights), y)
    return y


def _move(call: Any, rows: int, given: Tensor, choices: tuple[Tensor, Tensor, Tensor | None], out: Tensor) -> None:
    given, stride = as_rows(given)
    position, routed, weights = choices
    position, routed = position.contiguous(), routed.contiguous()
    weights = None if weights is None else weights.contiguous()
    arguments = {
        **_choices(position, routed, given, rows),
        "weights": address(weights),
        "from_": address(given),
        "stride": stride,
        "out": address(out),
    }
    submit(call, given, arguments)


def _dot_rows(rows: Tensor, dy: Tensor, position: Tensor, routed: Tensor) -> Tensor:
    products: Tensor = MOVE_OPERATORS["dot_rows"].fake(rows, dy, position, routed)
    (rows, row_stride), (dy, dy_stride) = as_rows(rows), as_rows(dy)
    position, routed = position.contiguous(), routed.contiguous()
    arguments = {
        **_choices(position, routed, dy, rows.shape[0]),
        "rows": address(rows),
        "row_stride": row_stride,
        "dy": address(dy),
        "dy_stride": dy_stride,
        "out": address(products),
    }
    submit(octavo_native.dot_rows, dy, arguments)
    return products


def _choices(position: Tensor, routed: Tensor, like: Tensor, rows: int) -> dict[str, Any]:
    return {
        "tokens": position.shape[0],
        "each": position.shape[1],
        "row_count": rows,
        "position": address(position),
        "routed": address(routed),
        "dtype": DTYPE_NUMBERS[like.dtype],
        "cols": like.shape[1],
    }


def _defined(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    form = MOVE_OPERATORS[name]
    return define(form.schema, function, form.fake)


route = _defined("route", _route)
permute_rows = _defined("permute_rows", _permute_rows)
combine_rows = _defined("combine_rows", _combine_rows)
dot_rows = _defined("dot_rows", _dot_rows)

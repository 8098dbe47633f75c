"""Moved rows: the bound functions of octavo_registry.contract.moves but for "route", one launch each.

They are custom operators of the front end's schemas. Of x, rows or dy with adjacent columns no copy is made.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from octavo_torch.plugin_api import DTYPE_NAMES, MOVE_OPERATORS
from octavo_torch_triton.arrays.launch import as_rows, start, stored
from octavo_torch_triton.arrays.row_index import define
from octavo_triton.kernels import moves as kernels
from octavo_triton.layouts import tiles

_ELEMENTS = 4096
"""Tokens times columns of a program where rows are wide: two pieces of 16 bytes per thread in bf16."""
_MOST_COLUMNS, _MOST_TOKENS, _WARPS = 1024, 256, 8


def _permute_rows(x: Tensor, order: Tensor, position: Tensor, routed: Tensor, weights: Tensor | None) -> Tensor:
    rows: Tensor = MOVE_OPERATORS["permute_rows"].fake(x, order)
    _move(kernels.permute_rows, x, position, routed, weights, rows)
    return rows


def _combine_rows(rows: Tensor, position: Tensor, routed: Tensor, weights: Tensor | None) -> Tensor:
    y: Tensor = MOVE_OPERATORS["combine_rows"].fake(rows, position)
    _move(kernels.combine_rows, rows, position, routed, weights, y)
    return y


def _move(kernel: Any, given: Tensor, position: Tensor, routed: Tensor, weights: Tensor | None, out: Tensor) -> None:
    (given, stride), (tokens, choices), columns = as_rows(given), position.shape, given.shape[1]
    how = _how(given)
    grid = tiles(tokens, how["TOKENS"]), tiles(columns, how["COLUMNS"])
    factors = None if weights is None else weights.contiguous()
    places = position.contiguous(), stored(routed.contiguous())
    start(kernel, grid, given, (stored(given), *places, factors, stored(out), tokens, choices, columns, stride), **how)


def _dot_rows(rows: Tensor, dy: Tensor, position: Tensor, routed: Tensor) -> Tensor:
    products: Tensor = MOVE_OPERATORS["dot_rows"].fake(rows, dy, position, routed)
    (rows, row_stride), (dy, dy_stride) = as_rows(rows), as_rows(dy)
    how, (tokens, choices) = _how(dy), position.shape
    places = position.contiguous(), stored(routed.contiguous())
    sides = tokens, choices, dy.shape[1], row_stride, dy_stride
    grid = tiles(tokens, how["TOKENS"]), choices
    start(kernels.dot_rows, grid, dy, (stored(rows), stored(dy), *places, products, *sides), **how)
    return products


def _how(like: Tensor) -> dict[str, Any]:
    columns = max(1, min(_MOST_COLUMNS, 1 << (like.shape[1] - 1).bit_length()))
    tile = {"TOKENS": min(_MOST_TOKENS, _ELEMENTS // columns), "COLUMNS": columns}
    return {"DTYPE": DTYPE_NAMES[like.dtype], **tile, "num_warps": _WARPS}


def _defined(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    return define(MOVE_OPERATORS[name].schema, function, MOVE_OPERATORS[name].fake)


permute_rows = _defined("permute_rows", _permute_rows)
combine_rows = _defined("combine_rows", _combine_rows)
dot_rows = _defined("dot_rows", _dot_rows)

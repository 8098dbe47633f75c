"""Who routes choices and moves rows: a backend's functions, or torch's operations where none serves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

import octavo_registry as registry
from octavo import NoBackendError
from octavo_registry.contract.cards import Move
from octavo_registry.contract.request import MoveRequest
from octavo_torch.arrays.dtypes import DTYPE_NAMES
from octavo_torch.compiler.graphs import wants_graph
from octavo_torch.dispatch.memo import Kept, arch_of
from octavo_torch.moe import gathers

Run = Callable[..., Any]
Names = str | tuple[str, ...] | None

_OWN: dict[Move, Run] = {
    "route": gathers.route,
    "permute_rows": gathers.permute_rows,
    "combine_rows": gathers.combine_rows,
    "dot_rows": gathers.dot_rows,
}
_MOVES: tuple[Move, ...] = ("permute_rows", "combine_rows", "dot_rows")
_functions: Kept[Run] = Kept()


class Moves(NamedTuple):
    """The functions that move rows, of one dtype and device: octavo_registry.contract.moves has the calls."""

    permute_rows: Run
    combine_rows: Run
    dot_rows: Run


def moves_for(x: Tensor, backend: Names) -> Moves:
    """Those for rows like `x`. A backward takes forward's: its thread knows nothing of `octavo_registry.prefer`."""
    return Moves(*(_function(op, x, backend) for op in _MOVES))


def route_for(x: Tensor, groups: int, backend: Names) -> Run:
    """The function that routes tokens `x` to `groups`."""
    return _function("route", x, backend, groups)


def _function(op: Move, x: Tensor, backend: Names, groups: int | None = None) -> Run:
    graph_safe = wants_graph(x)
    key = (op, x.dtype, x.device, backend, groups, graph_safe)
    return _functions.get(key, lambda: _planned(op, x, backend, groups, graph_safe))


def _planned(op: Move, x: Tensor, backend: Names, groups: int | None, graph_safe: bool) -> Run:
    name = DTYPE_NAMES[x.dtype]
    request = MoveRequest(
        op=op,
        framework="torch",
        device=x.device.type,
        in_dtype=name,
        out_dtype=name,
        arch=arch_of(x.device),
        groups=groups,
        graph_safe=graph_safe,
    )
    try:
        run: Run = registry.plan(request, backend=backend).run
        return run
    except NoBackendError:
        return _OWN[op]

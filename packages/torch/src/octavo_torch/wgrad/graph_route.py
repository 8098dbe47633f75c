"""How torch.compile takes a call: as one node of its graph, or beside it, where weight gradients go into buffers."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from octavo_torch.compiler.tracing import in_graph, one_node
from octavo_torch.wgrad.target import OUTSIDE_GRAPH


def graph_route(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`function` for callers that dynamo traces.

    Dynamo sees one call. What happens inside is traced below it, where the registry, memos and autograd are plain
    Python. Keywords that are None are left out, because a call out of traced code takes no None.
    """
    as_one_node = one_node(function)
    beside_graph: Callable[..., Tensor] = torch.compiler.disable(function, reason=OUTSIDE_GRAPH)  # type: ignore[no-untyped-call]

    def traced(*operands: object, **options: object) -> Tensor:
        present = in_graph(operands[0], options)
        if "main_grad" in present or "delayed_wgrad" in present:
            return beside_graph(*operands, **present)
        return as_one_node(*operands, **present)

    return traced

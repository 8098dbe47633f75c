"""Chooses the implementation of the delayed-scaling update: a backend's fused call or plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from octavo import DelayedScaling
from octavo_registry import plan_if_served
from octavo_registry.contract.quantize import UpdateScales
from octavo_registry.contract.request import QuantizeRequest
from octavo_torch.compiler.graphs import wants_graph
from octavo_torch.compiler.tracing import is_plain
from octavo_torch.dispatch.device import arch_of
from octavo_torch.memo import Memo

Update = UpdateScales[Tensor]

_is_compiling = torch.compiler.is_compiling
_updates: Memo[Update | None] = Memo()


def fused_update(recipe: DelayedScaling, history: Tensor, scale: Tensor) -> Update | None:
    """`update_scales` of the backend that quantizes on this device; None where it has none, or not for such tensors."""
    if _is_compiling() or not all(is_plain(part) and part.is_contiguous() for part in (history, scale)):
        return None
    graph_safe = wants_graph(history)
    key = (id(recipe), history.device, graph_safe)
    return _updates.get(key, lambda: _resolve(recipe, history.device, graph_safe), recipe)


def _resolve(recipe: DelayedScaling, device: torch.device, graph_safe: bool) -> Update | None:
    spec = recipe.quantizer("x") or recipe.quantizer("dy")
    if spec is None:
        return None  # nothing is quantized
    request = QuantizeRequest(
        op="quantize",
        framework="torch",
        device=device.type,
        in_dtype="bfloat16",
        out_dtype="bfloat16",
        quantizer=spec,
        arch=arch_of(device),
        graph_safe=graph_safe,
    )
    plan = plan_if_served(request)
    # where there is none, each layer may still name a backend that serves it
    return None if plan is None else plan.bound.update_scales

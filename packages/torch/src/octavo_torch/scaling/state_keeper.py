"""Finds the backend that keeps delayed scaling's state, in a launch for each change of it; else plain torch does."""

from __future__ import annotations

import torch
from torch import Tensor

from octavo import DelayedScaling
from octavo_registry import plan_if_served
from octavo_registry.contract.quantize import AnyBoundQuantize
from octavo_registry.contract.request import QuantizeRequest
from octavo_torch.compiler.graphs import wants_graph
from octavo_torch.compiler.tracing import is_plain
from octavo_torch.dispatch.device import arch_of
from octavo_torch.memo import Memo

_is_compiling = torch.compiler.is_compiling
_keepers: Memo[AnyBoundQuantize | None] = Memo()


def state_keeper(recipe: DelayedScaling, history: Tensor, scale: Tensor) -> AnyBoundQuantize | None:
    """The backend's quantizer on this device, whose `update_scales` and `record_amax` may change such tensors; None
    where there is none, or not for such tensors."""
    if _is_compiling() or not all(is_plain(part) and part.is_contiguous() for part in (history, scale)):
        return None
    graph_safe = wants_graph(history)
    key = (id(recipe), history.device, graph_safe)
    return _keepers.get(key, lambda: _resolve(recipe, history.device, graph_safe), recipe)


def _resolve(recipe: DelayedScaling, device: torch.device, graph_safe: bool) -> AnyBoundQuantize | None:
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
    return None if plan is None else plan.bound

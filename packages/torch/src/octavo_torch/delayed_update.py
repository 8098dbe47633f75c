"""Who makes delayed scaling's next scales: a backend at once, or torch's operations one by one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import octavo_registry as registry
from octavo import DelayedScaling, NoBackendError
from octavo_registry.request import Request
from octavo_torch.graphs import wants_graph
from octavo_torch.tracing import is_plain

Update = Callable[..., None]

_is_compiling = torch.compiler.is_compiling
_updates: dict[tuple[Any, ...], tuple[object, DelayedScaling, Update | None]] = {}
_MOST_UPDATES = 1024


def update_of(recipe: DelayedScaling, history: Tensor, scale: Tensor) -> Update | None:
    """The `update_scales` of the backend that quantizes on this device; None where there is none for such tensors."""
    if _is_compiling() or not all(is_plain(part) and part.is_contiguous() for part in (history, scale)):
        return None
    key = (id(recipe), history.device, wants_graph(history))
    known = _updates.get(key)
    if known is not None and known[0] is registry.state_token() and known[1] is recipe:
        return known[2]
    if len(_updates) >= _MOST_UPDATES:
        _updates.clear()
    update = _planned(recipe, history.device, key[2])
    _updates[key] = registry.state_token(), recipe, update
    return update


def _planned(recipe: DelayedScaling, device: torch.device, graph_safe: bool) -> Update | None:
    spec = recipe.quantizer("x") or recipe.quantizer("dy")
    if spec is None:
        return None  # nothing is quantized
    request = Request(
        op="quantize",
        framework="torch",
        device=device.type,
        in_dtype="bfloat16",
        out_dtype="bfloat16",
        quantizer=spec,
        arch=torch.cuda.get_device_capability(device) if device.type == "cuda" else None,
        graph_safe=graph_safe,
    )
    try:
        return registry.plan(request).update_scales
    except NoBackendError:  # the layers have a backend of their own, named by each
        return None

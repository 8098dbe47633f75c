"""One forward and backward of grouped_linear on this backend, with the scales of a problem as its state."""

from __future__ import annotations

from typing import Any

import torch
from gemm_layers import SEED, Layer
from torch import Tensor

from octavo_torch import DelayedState, grouped_linear

BACKEND = "torch-native"
SPLIT = [33, 0, 1, 70, 16]


def state_of(layer: Layer) -> DelayedState | None:
    """The problem's own scales, in the order of a state's operands."""
    if not layer.recipe.stateful:
        return None
    state = DelayedState.create(layer.recipe, len(layer.problem.sizes), layer.device)  # type: ignore[arg-type]
    for index, operand in enumerate(("x", "w", "dy")):
        state.scale[index].copy_(torch.from_numpy(layer.problem.scales[operand]))
    return state


def step(layer: Layer, **rest: Any) -> dict[str, Tensor]:
    """y, dx and dw of one forward and backward."""
    x, w = layer.array("x").requires_grad_(), layer.array("w").requires_grad_()
    y = grouped_linear(
        x, w, layer.sizes, recipe=layer.recipe, seed=SEED, state=state_of(layer), backend=BACKEND, **rest
    )
    dx, dw = torch.autograd.grad(y, (x, w), layer.array("dy"))
    return {"fprop": y.detach(), "dgrad": dx, "wgrad": dw}

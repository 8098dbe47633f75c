"""One training step of octavo_torch.grouped_linear, and of torch's own grouped GEMM."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

import octavo_torch
from octavo import DelayedScaling
from octavo_bench.harness.engine.protocol import Engine
from octavo_bench.harness.problem import Data, Names
from octavo_bench.harness.recipes import recipe_of
from octavo_bench.harness.timing import Call
from octavo_bench.peers.peer import check_aligned
from octavo_bench.step.row import PEER


def torch_steps(
    engine: Engine, data: Data, sizes: Sequence[int], kind: str, backend: Names, *, reuse: bool
) -> list[Call]:
    """Calls that return the gradients of x and w, one a set of buffers."""
    if kind == PEER:
        check_aligned(sizes, 8, "torch's wgrad")
    held = engine.array(list(sizes), "int64")
    calls = []
    for arrays in data.sets:
        x, w = (arrays[name].detach().requires_grad_() for name in ("x", "w"))
        if kind == PEER:
            calls.append(_own(x, w, arrays["dy"], held))
        else:
            calls.append(_ours(x, w, arrays["dy"], held, kind, backend, reuse))
    return calls


def _own(x: Tensor, w: Tensor, dy: Tensor, sizes: Tensor) -> Call:
    ends = torch.cumsum(sizes, 0).to(torch.int32)
    return lambda: torch.autograd.grad(torch._grouped_mm(x, w.transpose(1, 2), offs=ends), (x, w), dy)


def _ours(x: Tensor, w: Tensor, dy: Tensor, sizes: Tensor, kind: str, backend: Names, reuse: bool) -> Call:
    recipe = recipe_of(kind)
    more: dict[str, Any] = {}
    state = None
    if isinstance(recipe, DelayedScaling):
        state = more["state"] = octavo_torch.DelayedState.create(recipe, w.shape[0], w.device)
    if recipe.stochastic:
        more["seed"] = 1
    weight: Any = w
    if reuse:
        weight = octavo_torch.quantize_weight(w, recipe, state=state, seed=more.get("seed"), backend=backend)

    def call() -> Any:
        y = octavo_torch.grouped_linear(x, weight, sizes, recipe=recipe, backend=backend, **more)
        gradients = torch.autograd.grad(y, (x, w), dy)
        if state is not None:
            state.update()
        return gradients

    return call

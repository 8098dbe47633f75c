"""Steps of `octavo_torch.grouped_linear` and of torch's own grouped GEMM, and what all timed steps in torch share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

import octavo_torch
from octavo import DelayedScaling, Recipe
from octavo_bench.harness.engine.protocol import Engine
from octavo_bench.harness.options import Names
from octavo_bench.harness.problem import Data
from octavo_bench.harness.recipes import FRAMEWORK, recipe_of
from octavo_bench.harness.timing import Call
from octavo_bench.peers.grouped_mm import check_aligned, ends_of, grouped


def gradients_call(
    forward: Callable[[], Tensor],
    leaves: Sequence[Tensor | None],
    dy: Tensor,
    states: Sequence[octavo_torch.DelayedState] = (),
) -> Call:
    """A call that returns the gradients of the leaves, None left out, and ends the step of delayed scaling's states."""
    differentiated = [leaf for leaf in leaves if leaf is not None]

    def call() -> Any:
        gradients = torch.autograd.grad(forward(), differentiated, dy)
        for state in states:
            state.update()
        return gradients

    return call


def delayed_states(recipe: Recipe, groups: int, device: Any, layers: int) -> tuple[octavo_torch.DelayedState, ...]:
    """A state for each layer, where the recipe keeps one."""
    if not isinstance(recipe, DelayedScaling):
        return ()
    return tuple(octavo_torch.DelayedState.create(recipe, groups, device) for _ in range(layers))


def call_options(recipe: Recipe, backend: Names, state: Any) -> dict[str, Any]:
    """What a layer's function is called with beside its operands; `state` is delayed scaling's, None for others."""
    return {"recipe": recipe, "backend": backend, "state": state, "seed": 1 if recipe.stochastic else None}


def linear_calls(
    engine: Engine, data: Data, sizes: Sequence[int], kind: str, backend: Names, *, reuse: bool = False
) -> list[Call]:
    """Calls that return the gradients of x and w, one per set of buffers.

    kind    a kind of recipe, or `FRAMEWORK`
    reuse   weights are quantized once, outside of the step
    """
    rows = engine.array(list(sizes), "int64")
    if kind == FRAMEWORK:
        check_aligned(sizes)
    calls = []
    for arrays in data.sets:
        x, w = (arrays[name].detach().requires_grad_() for name in ("x", "w"))
        if kind == FRAMEWORK:
            calls.append(gradients_call(partial(grouped, x, w, ends_of(rows)), (x, w), arrays["dy"]))
        else:
            calls.append(_linear_call(x, w, arrays["dy"], rows, kind, backend, reuse))
    return calls


def _linear_call(x: Tensor, w: Tensor, dy: Tensor, sizes: Tensor, kind: str, backend: Names, reuse: bool) -> Call:
    recipe = recipe_of(kind)
    states = delayed_states(recipe, len(w), w.device, 1)
    how = call_options(recipe, backend, states[0] if states else None)
    weight: Any = octavo_torch.quantize_weight(w, **how) if reuse else w
    forward = partial(octavo_torch.grouped_linear, x, weight, sizes, **how)
    return gradients_call(forward, (x, w), dy, states)

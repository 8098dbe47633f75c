"""A Mixture-of-Experts layer in torch: its router, and the calls of ours that are timed."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

import octavo_torch
from octavo_bench.harness.options import Names
from octavo_bench.harness.recipes import recipe_of
from octavo_bench.harness.timing import Call
from octavo_bench.training.moe import Layer, Operands
from octavo_bench.training.torch import call_options, delayed_states, gradients_call


def route(operands: Operands, choices: int) -> tuple[Tensor, Tensor]:
    """Experts [T, k] of each token and their weights [T, k] fp32, which sum to 1."""
    logits = (operands.x @ operands.router.T).float() + operands.balance
    weights, index = torch.softmax(logits, -1).topk(choices, dim=-1)
    return index, weights / weights.sum(-1, keepdim=True)


def moe_calls(layer: Layer, kind: str, backend: Names) -> list[Call]:
    """`permute`, `grouped_mlp` and `unpermute`: calls that return the gradients of all leaves."""
    recipe, groups = recipe_of(kind), layer.shape.groups
    states = delayed_states(recipe, groups, layer.sets[0].x.device, 2)
    how = call_options(recipe, backend, states or None)

    def forward(operands: Operands) -> Tensor:
        index, weights = route(operands, layer.choices)
        rows, sizes, routing = octavo_torch.permute(operands.x, index, groups, backend=backend)
        probs = routing.to_rows(weights, backend=backend)
        y = octavo_torch.grouped_mlp(rows, operands.w1, operands.w2, sizes, probs=probs, **how)
        return octavo_torch.unpermute(y, routing, backend=backend)

    return [gradients_call(partial(forward, one), one.leaves, one.dy, states) for one in layer.sets]

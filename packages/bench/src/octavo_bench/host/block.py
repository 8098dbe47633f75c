"""A MoE layer in torch from given choices: its calls from Python, and its CUDA graph."""

from __future__ import annotations

from functools import partial

import torch

import octavo_torch
from octavo_bench.harness.engine.torch import TorchEngine
from octavo_bench.harness.options import Names
from octavo_bench.harness.recipes import FRAMEWORK, recipe_of
from octavo_bench.harness.timing import Call, Times, cuda_times
from octavo_bench.host.torch import graph_of, unhindered
from octavo_bench.peers.grouped_mm import check_aligned, moe_layer
from octavo_bench.training.moe import Layer
from octavo_bench.training.torch import call_options, delayed_states, gradients_call

_AT_ONCE = 4
"""Steps between two synchronizations: some hundred launches, where a stream's queue takes about a thousand."""


def block_call(layer: Layer, kind: str, backend: Names) -> Call:
    """A call that returns the gradients of x, w1 and w2: `moe_mlp`, or torch's own grouped GEMM (`FRAMEWORK`)."""
    operands, groups = layer.sets[0], layer.shape.groups
    index = layer.even_choices()
    weights = torch.full(index.shape, 1 / layer.choices, device=index.device)
    leaves = x, w1, w2 = operands.x, operands.w1, operands.w2
    if kind == FRAMEWORK:
        check_aligned([layer.shape.rows // groups])
        return gradients_call(partial(moe_layer, x, w1, w2, index, weights), leaves, operands.dy)
    recipe = recipe_of(kind)
    states = delayed_states(recipe, groups, index.device, 2)
    how = call_options(recipe, backend, states or None)
    return gradients_call(partial(octavo_torch.moe_mlp, x, index, weights, w1, w2, **how), leaves, operands.dy, states)


def host_of_block(engine: TorchEngine, call: Call, repeats: int) -> tuple[Times, Times]:
    """Microseconds of the host, none of them spent waiting on a GPU: with autograd's threads, and in one thread."""
    with_threads = unhindered(engine, call, repeats, _AT_ONCE)
    with torch.autograd.set_multithreading_enabled(False):
        return with_threads, unhindered(engine, call, repeats, _AT_ONCE)


def replay_of_block(engine: TorchEngine, captured: Call, repeats: int) -> Times | None:
    """Device time of a replay of the step's CUDA graph; None without a GPU."""
    if not engine.cuda:
        return None
    return cuda_times([graph_of(captured).replay], repeats)

"""torch.cuda.make_graphed_callables and whole MLPs in graphs: the bits of eager at every replay.

Skipped where torch sees no Hopper device or octavo-native was built without CUDA kernels.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from graph_layers import MARKS, Differences, G, K, M, N, follow, inputs, pair, splits, state, stir, train
from torch import Tensor

import octavo_torch_cudagraph as graphs
from octavo import Recipe
from octavo_conformance.cards.variants import RECIPES
from octavo_torch import GroupedMLP
from octavo_torch.compiler.graphs import no_waiting
from octavo_torch_cudagraph.restoring import state_of

pytestmark = MARKS

F = 144


# torch's own warm-up leaves nodes behind that its capture, on another stream, meets
@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream does not match:UserWarning")
@pytest.mark.parametrize("name", RECIPES)
def test_torchs_own_graphed_callables(name: str, rng: np.random.Generator) -> None:
    """No helper of ours: torch warms up, captures and replays, and nothing waits (faults 35, 36, 37)."""
    layer, twin = pair(RECIPES[name])
    x, _, sizes = inputs([50] * G)
    torch.cuda.make_graphed_callables(layer, (x.requires_grad_(), sizes))
    follow(twin, layer)  # torch's warm-up has moved states and seeds
    wrong = Differences()
    for number, split in enumerate(splits(rng, 12)):
        stir(layer)
        follow(layer, twin)
        arguments = inputs(split)
        with no_waiting():
            made, expected = train(layer, *arguments), train(twin, *arguments)
            wrong.add(f"step {number}, sizes {split}", [*made, *state(layer)], [*expected, *state(twin)])
    wrong.none()


def experts(recipe: Recipe) -> tuple[GroupedMLP, GroupedMLP]:
    """An MLP for graphs, whose backend is chosen by the registry, and its twin for eager calls."""
    made = []
    for backend in (None, "torch-native"):
        layer = GroupedMLP(
            G, K, F, N, bias=True, recipe=recipe, device="cuda", dtype=torch.bfloat16, backend=backend, seed=1,
            main_grad="accumulate",
        )  # fmt: skip
        for weight in (layer.weight1, layer.weight2):
            weight.main_grad = torch.zeros(weight.shape, device="cuda")
        made.append(layer)
    return made[0], made[1]


def step_of(layer: GroupedMLP) -> Callable[..., tuple[Tensor, ...]]:
    def step(x: Tensor, probs: Tensor, dy: Tensor, sizes: Tensor) -> tuple[Tensor, ...]:
        leaves = x.detach().requires_grad_(), probs.detach().requires_grad_()
        y = layer(leaves[0], sizes, leaves[1])
        grads = torch.autograd.grad(y, (*leaves, *layer.parameters()), dy)
        layer.update_scales()
        return y, *grads

    return step


@pytest.mark.parametrize("name", RECIPES)
def test_an_mlp_in_a_graph(name: str, rng: np.random.Generator) -> None:
    """Fused quantizers, probabilities, main_grad of both weights, states and seeds (faults 33, 35, 36, 37)."""
    layer, twin = experts(RECIPES[name])

    @torch.no_grad()
    def same_state() -> None:
        for ours, theirs in zip(state_of(layer), state_of(twin), strict=True):
            theirs.copy_(ours)

    def arguments(split: list[int]) -> tuple[Tensor, ...]:
        x, dy, sizes = inputs(split)
        probs = torch.rand(M, device="cuda")
        probs[sum(split) :] = torch.nan
        return x, probs, dy, sizes

    step, eager = step_of(layer), step_of(twin)
    captured = graphs.capture(step, *arguments([7] * G), restore=state_of(layer))
    same_state()
    wrong = Differences()
    for number, split in enumerate(splits(rng, 25)):
        with torch.no_grad():
            for parameter in layer.parameters():
                parameter.normal_(std=0.1)
            for weight in (layer.weight1, layer.weight2):
                weight.main_grad.normal_()
        same_state()
        given = arguments(split)
        with no_waiting():
            made, expected = captured(*given), eager(*given)
            wrong.add(f"replay {number}, sizes {split}", [*made, *state_of(layer)], [*expected, *state_of(twin)])
    wrong.none()

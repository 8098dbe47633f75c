"""Weight gradients that come later, inside a captured function: on a stream of its own, with eager's bits.

Skipped where torch sees no Hopper device or octavo-native was built without CUDA kernels.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from graph_layers import MARKS, Differences, G, K, M, N, inputs, splits
from torch import Tensor

import octavo_torch_cudagraph as graphs
from octavo_conformance.cards.variants import RECIPES
from octavo_torch import GroupedLinear
from octavo_torch.compiler.graphs import GraphUnsafeError, no_waiting

pytestmark = MARKS


def pair(recipe: Any, main_grad: Any) -> list[GroupedLinear]:
    made = []
    for backend, delay in ((None, True), ("torch-native", False)):
        layer = GroupedLinear(
            G, K, N, recipe=recipe, device="cuda", dtype=torch.bfloat16, backend=backend, seed=1, main_grad=main_grad,
            delay_wgrad=delay,
        )  # fmt: skip
        layer.weight.main_grad = torch.zeros(G, N, K, device="cuda")  # type: ignore[attr-defined]
        made.append(layer)
    return made


def state(layer: GroupedLinear) -> list[Tensor]:
    return [layer.weight, layer.weight.main_grad, *layer.buffers()]  # type: ignore[list-item]


@pytest.mark.parametrize("main_grad", [None, "accumulate"], ids=["grad", "main_grad"])
@pytest.mark.parametrize("name", RECIPES)
def test_replays_equal_eager(name: str, main_grad: Any, rng: np.random.Generator) -> None:
    """Backward and backward_dw in one graph, the latter on a side stream, for other sizes and weights at each replay
    (faults 34, 36)."""
    layer, twin = pair(RECIPES[name], main_grad)
    side = torch.cuda.Stream()

    def step(x: Tensor, dy: Tensor, sizes: Tensor) -> tuple[Tensor, ...]:
        layer.weight.grad = None
        y = layer(x, sizes)
        y.backward(dy)
        with torch.cuda.stream(side):
            layer.backward_dw()
        torch.cuda.current_stream().wait_stream(side)
        grad = layer.weight.grad
        assert grad is not None
        return y, grad

    captured = graphs.capture(step, *inputs([7] * G), restore=state(layer))
    wrong = Differences()
    for split in splits(rng, 6):
        with torch.no_grad():
            for ours, theirs in zip(state(layer)[:2], state(twin)[:2], strict=True):
                theirs.copy_(ours.normal_())
            for ours, theirs in zip(layer.buffers(), twin.buffers(), strict=True):
                theirs.copy_(ours)
        arguments = inputs(split)
        torch.full((1 << 24,), torch.nan, device="cuda")
        with no_waiting():
            made = captured(*arguments)
            twin.weight.grad = None
            y = twin(arguments[0], arguments[2])
            y.backward(arguments[1])
        assert twin.weight.grad is not None
        wrong.add(f"sizes {split}", [*made, *state(layer)], [y, twin.weight.grad, *state(twin)])
    wrong.none()


def test_both_in_one_graph_or_in_none(rng: np.random.Generator) -> None:
    """What a captured backward left out is no business of an eager backward_dw."""
    layer, _ = pair(RECIPES["mxfp8"], None)
    graphs.capture(lambda x, dy, sizes: layer(x, sizes).backward(dy), *inputs([M // G] * G))
    with pytest.raises(GraphUnsafeError, match="not in the same CUDA graph, or one of them is in none"):
        layer.backward_dw()

"""Pipelines and microbatches in graphs on a device: several in flight, and every bit of eager.

Skipped where torch sees no Hopper device or octavo-native was built without CUDA kernels.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from graph_layers import MARKS, Differences, G, K, M, splits
from torch import Tensor, nn

import octavo_torch_cudagraph as graphs
from octavo import Recipe
from octavo_conformance.cards.variants import RECIPES
from octavo_torch import Activation, GroupedLinear, Sequential
from octavo_torch.compiler.graphs import no_waiting
from octavo_torch_cudagraph.order import steps_of

pytestmark = MARKS

F = 144
ORDERS = {
    "1F1B": [1, 1, -1, 1, -1, 1, -1, -1],
    "interleaved": [1, 1, 2, 2, -2, 1, -2, 2, -1, -2, -1, -1],
}


def experts(recipe: Recipe, main_grad: Any, backend: str | None) -> Sequential:
    rest: dict[str, Any] = {
        "bias": True, "recipe": recipe, "device": "cuda", "dtype": torch.bfloat16, "seed": 1, "main_grad": main_grad,
        "backend": backend,
    }  # fmt: skip
    made = Sequential(GroupedLinear(G, K, 2 * F, **rest), Activation(), GroupedLinear(G, F, K, **rest))
    for name, parameter in made.named_parameters():
        if main_grad is not None and "weight" in name:
            parameter.main_grad = torch.zeros(parameter.shape, device="cuda")  # type: ignore[attr-defined]
    return made


def pair(recipe: Recipe, main_grad: Any) -> tuple[Sequential, Sequential]:
    ours, twin = experts(recipe, main_grad, None), experts(recipe, main_grad, "torch-native")
    twin.load_state_dict(ours.state_dict())
    return ours, twin


def batch(split: list[int]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x, dy, probs and sizes, with NaN past the sum."""
    x, dy = torch.randn(M, K, device="cuda"), torch.randn(M, K, device="cuda")
    probs = torch.rand(M, device="cuda")
    for value in (x, dy, probs):
        value[sum(split) :] = torch.nan
    return x.bfloat16(), dy.bfloat16(), probs, torch.tensor(split, device="cuda", dtype=torch.int32)


def state(model: nn.Module) -> list[Tensor]:
    """Parameters, buffers, gradients and main_grad."""
    found = [*model.parameters(), *model.buffers()]
    found += [p.grad for p in model.parameters() if p.grad is not None]
    return found + [p.main_grad for p in model.parameters() if hasattr(p, "main_grad")]  # type: ignore[misc]


KINDS = [
    pytest.param("1F1B", None, id="1F1B-grad"),
    pytest.param("interleaved", "accumulate", id="interleaved-main_grad"),
    pytest.param("1F1B", "accumulate", id="1F1B-main_grad", marks=pytest.mark.slow),
    pytest.param("interleaved", None, id="interleaved-grad", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("order", "main_grad"), KINDS)
@pytest.mark.parametrize("name", RECIPES)
def test_a_pipeline_trains_as_eager(name: str, order: str, main_grad: Any, rng: np.random.Generator) -> None:
    """Outputs that wait for their backward, gradients that add up, main_grad, states and seeds, over two steps, with
    other sizes for each microbatch; nothing waits (faults 34, 35, 36, 37)."""
    chunks = [pair(RECIPES[name], main_grad) for _ in range(max(ORDERS[order]))]
    x, _, probs, sizes = batch([50] * G)
    samples = [(x.requires_grad_(), sizes, probs.requires_grad_())] * len(chunks)
    pipeline = graphs.make_graphed_pipeline([ours for ours, _ in chunks], samples, ORDERS[order], warmup=2)
    wrong = Differences()
    for number in range(2):
        flying: dict[tuple[int, int], Any] = {}
        every = iter(splits(rng, len(ORDERS[order])))
        for step in steps_of(ORDERS[order], len(chunks)):
            at = step.chunk, step.microbatch
            if step.is_forward:
                x, dy, probs, sizes = batch(next(every))
                flying[at] = []
                for call in (pipeline.forwards[step.chunk][step.microbatch], chunks[step.chunk][1]):
                    leaves = x.clone().requires_grad_(), probs.clone().requires_grad_()
                    with no_waiting():
                        flying[at].append((call(leaves[0], sizes, leaves[1]), *leaves, dy))
                continue
            # what no graph owns is overwritten
            torch.full((1 << 22,), torch.nan, device="cuda")
            made = []
            for y, *leaves, dy in flying.pop(at):
                with no_waiting():
                    y.backward(dy)
                made.append([y.detach(), *(leaf.grad for leaf in leaves)])
            wrong.add(f"step {number}, {step}", *made)
        for ours, twin in chunks:
            wrong.add(f"after step {number}", state(ours), state(twin))
    wrong.none()


@pytest.mark.parametrize("main_grad", [None, "accumulate"], ids=["grad", "main_grad"])
def test_gradients_add_up_over_microbatches(main_grad: Any, rng: np.random.Generator) -> None:
    """make_graphed, three microbatches before zero_grad: .grad is not the graph's own memory, which each replay writes;
    zeros for main_grad take none."""
    ours, twin = pair(RECIPES["mxfp8"], main_grad)
    x, _, probs, sizes = batch([50] * G)
    graphs.make_graphed(ours, (x.requires_grad_(), sizes, probs))
    wrong = Differences()
    for split in splits(rng, 3):
        x, dy, probs, sizes = batch(split)
        for model in (ours, twin):
            model(x.clone().requires_grad_(), sizes, probs).backward(dy)
        wrong.add(f"sizes {split}", state(ours), state(twin))
    wrong.none()


def test_zeros_for_main_grad_take_no_memory(rng: np.random.Generator) -> None:
    """backward() of a layer whose weight is 64 MB leaves nothing of that size, nor did it have it on the way."""
    layer = GroupedLinear(
        8, 2048, 2048, recipe=RECIPES["bf16"], device="cuda", dtype=torch.bfloat16, main_grad="accumulate",
        backend="torch-native",
    )  # fmt: skip
    layer.weight.main_grad = torch.zeros(8, 2048, 2048, device="cuda")  # type: ignore[attr-defined]
    x, sizes = torch.randn(64, 2048, device="cuda").bfloat16(), torch.tensor([8] * 8, device="cuda")
    layer(x, sizes).sum().backward()
    layer.zero_grad()
    for _ in range(2):
        y = layer(x, sizes).sum()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        y.backward()
        assert torch.cuda.max_memory_allocated() - before < layer.weight.numel()
        assert layer.weight.grad is not None
        assert layer.weight.grad.untyped_storage().nbytes() == 2

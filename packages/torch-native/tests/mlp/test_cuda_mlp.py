"""grouped_mlp on a Hopper device: the bits of the operations in a row, in graphs and without a wait.

Skipped where torch sees no Hopper device or octavo-native was built without CUDA kernels.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from cuda_device import MARKS, SPLITS, no_sync
from mlp_layers import assert_equal, assert_without_rows, composed, draw_mlp, fused, results
from torch import Tensor

from octavo import Recipe
from octavo_conformance.cards.variants import MORE_RECIPES, RECIPES
from octavo_native import ACTIVATIONS
from octavo_torch import GroupedMLP, Room, check_errors, explain_mlp, permute, unpermute

pytestmark = MARKS

SHAPE = (700, 272, 208, 144, 6)
M, K, F, N, G = SHAPE
ALL: dict[str, Recipe] = {**RECIPES, **MORE_RECIPES}


@pytest.fixture(autouse=True)
def no_flag_is_left() -> Iterator[None]:
    """Sizes that fit set no flag."""
    check_errors()
    yield
    check_errors()


@pytest.mark.parametrize("name", ALL)
def test_bits_of_the_operations_in_a_row(name: str, rng: np.random.Generator) -> None:
    """y, gradients and amax histories of every recipe, at even, ragged and empty groups, without a wait (faults.md 1, 3
    14, 36)."""
    recipe = ALL[name]
    for split in SPLITS:
        activation = str(rng.choice(list(ACTIVATIONS)))
        given = draw_mlp(SHAPE, split, activation, device="cuda")
        dy = torch.randn(M, N, device="cuda").bfloat16()
        dy[sum(split) :] = torch.nan
        call = given, torch.tensor(split, device="cuda"), activation, recipe, dy, 12345
        results(fused, *call)  # what is set up once may wait
        with no_sync():
            made = results(fused, *call)
        assert_equal(made, results(composed, *call), activation)
        assert all(bool(value.isfinite().all()) for value in made.values())


@pytest.mark.parametrize("name", RECIPES)
def test_room_changes_no_bit(name: str, rng: np.random.Generator) -> None:
    """Every GEMM on one multiprocessor, on all but one, and w2's quantizer beside fc1's product, many times over: what
    two streams read and write is ordered by events, and memory of the one is not given away under the other."""
    recipe, split = RECIPES[name], SPLITS[0]
    given = draw_mlp(SHAPE, split, "swiglu", device="cuda")
    dy = torch.randn(M, N, device="cuda").bfloat16()
    call = given, torch.tensor(split, device="cuda"), "swiglu", recipe, dy, 12345
    free = results(fused, *call)
    most = torch.cuda.get_device_properties(0).multi_processor_count
    for room in (Room(gemms=1), Room(gemms=most - 1), *[Room(w2=16)] * 20, Room(gemms=20, w2=8)):
        assert_equal(results(partial(fused, room=room), *call), free, room)
    with pytest.raises(ValueError, match=f"leaves {most} multiprocessors to others and cuda:0 has {most}"):
        results(partial(fused, room=Room(gemms=most)), *call)


class Block(torch.nn.Module):
    """Rows by expert, the MLP, and back."""

    def __init__(self, recipe: Recipe, room: Room | None = None) -> None:
        super().__init__()
        how: dict[str, Any] = {"recipe": recipe, "device": "cuda", "dtype": torch.bfloat16, "seed": 5, "room": room}
        self.experts = GroupedMLP(G, K, F, N, bias=True, **how)

    def forward(self, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        rows, sizes, routing = permute(x, index, G)
        return unpermute(self.experts(rows, sizes, routing.to_rows(weights)), routing)


def step(block: Block, x: Tensor, index: Tensor, weights: Tensor, dy: Tensor) -> list[Tensor]:
    """y, gradients of everything and the buffers; the parameters' gradients are made anew."""
    leaves = [value.detach().requires_grad_() for value in (x, weights)]
    y = block(leaves[0], index, leaves[1])
    grads = torch.autograd.grad(y, [*leaves, *block.parameters()], dy)
    block.experts.update_scales()
    return [y.detach(), *grads, *block.buffers()]


def batch(rng: np.random.Generator, kind: str) -> list[Any]:
    index = torch.from_numpy(np.stack([rng.permutation(G)[:2] for _ in range(M // 2)]))
    if kind == "dropped":
        index[torch.rand(index.shape) < 0.3] = -1
    elif kind == "one expert":
        index[:] = torch.tensor([4, -1])
    x, dy = torch.randn(M // 2, K).bfloat16(), torch.randn(M // 2, N).bfloat16()
    return [value.cuda() for value in (x, index, torch.rand(M // 2, 2), dy)]


@pytest.mark.parametrize("room", [None, Room(gemms=8, w2=16)], ids=str)
@pytest.mark.parametrize("name", RECIPES)
def test_replays_are_eager(name: str, room: Room | None, rng: np.random.Generator) -> None:
    """A block with its routing inside, captured once; replays with other routings, inputs and weights, the state of
    delayed scaling and the seed counter included, are eager bit for bit (faults.md 36, 37). The captured one may leave
    multiprocessors to others, with w2's quantizer on a stream beside the capture's."""
    block, twin = Block(RECIPES[name], room), Block(RECIPES[name])
    twin.load_state_dict(block.state_dict())
    held = batch(rng, "plain")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            step(block, *held)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with no_sync(), torch.cuda.graph(graph):
        made = step(block, *held)
    block.load_state_dict(twin.state_dict())
    for kind in ("dropped", "one expert", "plain"):
        for target, value in zip(held, batch(rng, kind), strict=True):
            target.copy_(value)
        with torch.no_grad():
            for ours, theirs in zip(block.parameters(), twin.parameters(), strict=True):
                ours.mul_(0.9)
                theirs.copy_(ours)
        graph.replay()
        for ours, theirs in zip(made, step(twin, *held), strict=True):
            assert torch.equal(ours, theirs), kind


def test_plans_of_device_sizes(rng: np.random.Generator) -> None:
    """Both quantizers between the layers are fused on the device."""
    given = draw_mlp(SHAPE, SPLITS[0], "swiglu", device="cuda")
    sizes = torch.tensor(SPLITS[0], device="cuda")
    for recipe in RECIPES.values():
        plan = explain_mlp(given["x"], given["w1"], given["w2"], sizes, recipe=recipe, backend="torch-native")
        for part in (plan.act, plan.dact):
            assert part.plan is not None, str(plan)
            assert part.plan.backend == "torch-native", str(plan)


@pytest.mark.parametrize("name", ALL)
def test_an_mlp_without_rows(name: str, rng: np.random.Generator) -> None:
    """A rank that no token was sent to: no row to launch a kernel for (faults.md 1, 54)."""
    assert_without_rows(SHAPE, str(rng.choice(list(ACTIVATIONS))), ALL[name], device="cuda")

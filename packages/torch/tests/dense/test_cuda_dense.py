"""Linear on a GPU: no host sync, and a captured graph has an eager call's bits. Skipped where torch sees none."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from octavo import MXFP8, BlockScaling, DelayedScaling, Recipe
from octavo_torch import Linear
from octavo_torch.compiler.graphs import no_waiting

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")

K, N = 160, 144
SHAPE = (2, 75)


def step(layer: Linear, x: Tensor, dy: Tensor) -> list[Tensor]:
    assert layer.bias is not None
    y = layer(x)
    return [y, *torch.autograd.grad(y, (x, layer.weight, layer.bias), dy)]


@pytest.mark.parametrize("recipe", [BlockScaling(), MXFP8(), DelayedScaling(history=4)], ids=lambda recipe: recipe.kind)
@pytest.mark.parametrize("backend", ["torch-reference", None])
def test_captured_once_and_replayed(recipe: Recipe, backend: str | None, rng: object) -> None:
    """Neither a call nor a capture waits for the device or copies sizes to it, and replays read new values."""
    layer = Linear(K, N, device="cuda", dtype=torch.bfloat16, recipe=recipe, backend=backend)
    x = torch.randn(*SHAPE, K, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    dy = torch.randn(*SHAPE, N, dtype=torch.bfloat16, device="cuda")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step(layer, x, dy)
        torch.cuda.synchronize()
        with no_waiting():
            step(layer, x, dy)
    torch.cuda.current_stream().wait_stream(stream)
    state = {key: value.clone() for key, value in layer.state_dict().items()}
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step(layer, x, dy)
    for _ in range(2):
        with torch.no_grad():
            x.copy_(torch.randn(*SHAPE, K, device="cuda"))
            dy.copy_(torch.randn(*SHAPE, N, device="cuda"))
        layer.load_state_dict(state)
        graph.replay()
        replayed = [value.clone() for value in captured]
        layer.load_state_dict(state)
        assert all(torch.equal(a, b) for a, b in zip(replayed, step(layer, x, dy), strict=True))

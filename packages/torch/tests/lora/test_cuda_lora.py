"""Adapters over frozen codes on a GPU: values within their bounds, no wait, captured once and replayed with other
routings. Skipped where torch sees no CUDA device."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from low_rank_oracle import assert_near, oracle
from torch import Tensor, nn

from octavo import PRESETS
from octavo_torch import GroupedLoRA, GroupedMLP, MoE, PackedWeight, add_lora, quantized_parameters
from octavo_torch.compiler.graphs import no_waiting

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")

G, K, F, M = 4, 256, 128, 300
ROUTINGS = ([33, 0, 150, 70], [0, 300, 0, 0], [1, 2, 3, 4], [0, 0, 0, 0])


def randomized(module: nn.Module) -> list[nn.Parameter]:
    own = [parameter for name, parameter in module.named_parameters() if "lora_" in name]
    for parameter in own:
        nn.init.normal_(parameter, std=0.2)
    return own


@pytest.mark.parametrize("rank", [8, 12, 64])
def test_an_adapter_is_within_its_bounds_of_float64(rank: int, rng: np.random.Generator) -> None:
    """delta, and the gradients of x, A and B, with rows past the sum of NaN and a group without rows."""
    sizes = ROUTINGS[0]
    used = sum(sizes)
    lora = GroupedLoRA(G, K, F, rank, alpha=16.0, dtype=torch.bfloat16, device="cuda")
    a, b = randomized(lora)
    x, dy = (torch.randn(M, columns, device="cuda").bfloat16() for columns in (K, F))
    x[used:], dy[used:] = torch.nan, torch.nan
    leaf = x.clone().requires_grad_()
    y = lora(leaf, torch.tensor(sizes, device="cuda"))
    dx, da, db = torch.autograd.grad(y, [leaf, a, b], dy)
    wanted = oracle(x[:used], sizes, a.detach(), b.detach(), lora.scale, dy[:used])
    for actual, near in ((y[:used], wanted.delta), (dx[:used], wanted.x), (da, wanted.a), (db, wanted.b)):
        assert_near(actual, near)
        assert bool(actual.any())


def packed(module: GroupedMLP, recipe: str) -> None:
    """MXFP4 in the place of the module's weights, two binades of scales, which codes of any recipe hold."""
    for name in ("weight1", "weight2"):
        groups, rows, columns = getattr(module, name).shape
        blocks = torch.randint(256, (groups, rows, columns // 2), dtype=torch.uint8, device="cuda")
        scales = torch.randint(119, 121, (groups, rows, columns // 32), dtype=torch.uint8, device="cuda")
        weight = PackedWeight(blocks, scales, PRESETS[recipe], torch.bfloat16)
        setattr(module, name, nn.Parameter(weight, requires_grad=False))


@pytest.mark.parametrize("name", ["GroupedMLP", "packed GroupedMLP", "MoE"])
@pytest.mark.parametrize("recipe", ["fp8-block", "mxfp8", "fp8-row"])
def test_captured_once_replayed_with_other_routings(name: str, recipe: str, rng: np.random.Generator) -> None:
    """A step over frozen codes and its adapters' gradients: eager never waits, and a graph has eager's bits."""
    with quantized_parameters(recipe):
        how: dict[str, Any] = {"dtype": torch.bfloat16, "device": "cuda", "seed": 3}
        module: Any = MoE(G, K, F, 2, **how) if name == "MoE" else GroupedMLP(G, K, F, **how)
    if name == "packed GroupedMLP":
        packed(module, recipe)
    add_lora(module, 8, alpha=16)
    own = randomized(module)
    x = torch.randn(M, K, device="cuda").bfloat16().requires_grad_()
    dy, sizes = torch.randn(M, K, device="cuda").bfloat16(), torch.tensor(ROUTINGS[0], device="cuda")

    def step() -> list[Tensor]:
        y: Tensor = module(x) if name == "MoE" else module(x, sizes)
        return [y, *torch.autograd.grad(y, [x, *own], dy)]

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    with no_waiting():
        step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for routing in ROUTINGS:
        with torch.no_grad():
            sizes.copy_(torch.tensor(routing))
            x.normal_()
            dy.normal_()
        graph.replay()
        for ours, eager in zip([value.clone() for value in captured], step(), strict=True):
            assert torch.equal(ours, eager)
    assert all(bool(value.any()) for value in captured) or not any(ROUTINGS[-1])

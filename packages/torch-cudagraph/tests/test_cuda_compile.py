"""torch.compile(mode="reduce-overhead") over a layer with this backend. Skipped where there is no Hopper device."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from graph_layers import MARKS, Differences, follow, inputs, pair, splits, state
from torch._dynamo.utils import counters

from octavo_conformance.cards.variants import RECIPES

pytestmark = MARKS

QUICK = ("bf16", "delayed", "nvfp4")
NAMES = [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in RECIPES]


@pytest.mark.parametrize("name", NAMES)
def test_reduce_overhead(name: str, rng: np.random.Generator) -> None:
    """Inductor captures forward and backward, states and seeds included; sizes and values change, the bits are those
    of eager."""
    torch.compiler.reset()
    counters.clear()
    layer, twin = pair(RECIPES[name])
    layer.backend = "torch-cudagraph"
    compiled = torch.compile(layer, fullgraph=True, mode="reduce-overhead")
    for split in splits(rng, 6):
        follow(layer, twin)
        x, dy, sizes = inputs(split)
        results = []
        for module, call in ((layer, compiled), (twin, twin)):
            leaf = x.clone().requires_grad_()
            torch.compiler.cudagraph_mark_step_begin()
            y = call(leaf, sizes)
            made = (y, *torch.autograd.grad(y, (leaf, module.weight, module.bias), dy))
            results.append([value.clone() for value in (*made, *state(module))])
            module.update_scales()
        wrong = Differences()
        wrong.add(f"sizes {split}", *results)
        wrong.none()
    assert not counters["inductor"]["cudagraph_skips"], "inductor ran it without CUDA graphs"

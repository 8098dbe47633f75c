"""What ranks do in the test of FSDP2 inside torch.autocast: importable by name, because other processes run it."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from rank_work.fsdp import RECIPES, SIZES, device, layer_of, norms_aside, same, sharded, sizes_of, steps


def train_in_autocast(names: list[str]) -> dict[str, list[bool]]:
    """Layers with weights in fp32, gathered again for the backward, which is outside of autocast."""
    found = {}
    for name in names:

        def forward(x: Tensor, layer: torch.nn.Module, again: bool = False) -> Tensor:
            with torch.autocast(device().type, dtype=torch.bfloat16):
                if again:
                    return checkpoint(layer, x, sizes_of(SIZES), use_reentrant=False)  # type: ignore[no-any-return]
                return layer(x, sizes_of(SIZES))  # type: ignore[no-any-return]

        one = layer_of(RECIPES[name]).float()
        expected = steps(one, lambda x, one=one: forward(x, one))
        for again in (False, True):
            shards = sharded(layer_of(RECIPES[name]).float(), 1)
            seen = steps(shards, lambda x, shards=shards, again=again: forward(x, shards, again))
            found[f"{name} {again}"] = same(norms_aside(seen), norms_aside(expected))
    return found

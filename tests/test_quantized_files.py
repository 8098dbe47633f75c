"""Weights from quantized files in a backend's own layouts: the codes that it would have made itself."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from octavo_torch import CodedWeight, GroupedMLP, expert_tensors, export_experts, load_experts

LAYOUTS: dict[str, Any] = {"fp8-block": "hf-fp8", "nvfp4": "modelopt-nvfp4"}


@pytest.mark.parametrize("recipe", LAYOUTS)
def test_a_loaded_layer_gives_the_bits_of_the_exported_one(recipe: str, tmp_path: Path) -> None:
    """fprop reads rows, dgrad reads panels, and a second export has the first one's bytes."""
    seed = secrets.randbits(32)
    print(f"seed {seed}")  # shown by pytest where the test fails
    torch.manual_seed(seed)
    made = [GroupedMLP(3, 256, 128, recipe=recipe, dtype=torch.bfloat16, backend="torch-native") for _ in range(2)]
    export_experts(made[0], tmp_path, LAYOUTS[recipe])
    assert load_experts(made[1], tmp_path) == {}
    assert isinstance(made[1].weight1, CodedWeight)
    x, dy = torch.randn(2, 9, 256).bfloat16()
    results: list[tuple[Tensor, Tensor | None]] = []
    for experts in made:
        for parameter in experts.parameters():
            parameter.requires_grad_(False)
        if "seed_base" in experts._buffers:
            experts.seed_base.zero_()
        leaf = x.clone().requires_grad_()
        y = experts(leaf, [4, 0, 5])
        y.backward(dy)
        results.append((y, leaf.grad))
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)  # type: ignore[arg-type]
    pairs = [dict(expert_tensors(experts, LAYOUTS[recipe])) for experts in made]
    assert all(
        torch.equal(value.view(-1).view(torch.uint8), pairs[1][name].view(-1).view(torch.uint8))
        for name, value in pairs[0].items()
    )

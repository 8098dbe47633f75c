"""Layers inside torch's wrapper for activation checkpointing: files name them as the state dict does."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from octavo_torch import (
    GroupedMLP,
    expert_tensors,
    load_checkpoint,
    load_distributed,
    recipe_state,
    save_checkpoint,
    save_distributed,
)


def models() -> tuple[GroupedMLP, nn.Module, nn.Module]:
    """A layer, the model that has it wrapped, and another model without wrappers."""
    layer = GroupedMLP(2, 128, 128, recipe="fp8-block", dtype=torch.bfloat16)
    wrapped = nn.ModuleDict({"block": checkpoint_wrapper(nn.ModuleDict({"experts": checkpoint_wrapper(layer)}))})
    other = GroupedMLP(2, 128, 128, recipe="fp8-block", dtype=torch.bfloat16)
    return layer, wrapped, nn.ModuleDict({"block": nn.ModuleDict({"experts": other})})


@pytest.mark.parametrize("kind", ["values", "codes", "shards"])
def test_files_are_those_of_the_model_without_wrappers(kind: str, tmp_path: Path) -> None:
    """Either loads what the other has saved."""
    layer, wrapped, plain = models()
    save, load = (save_distributed, load_distributed) if kind == "shards" else (save_checkpoint, load_checkpoint)
    how = {} if kind == "shards" else {"quantized": kind == "codes"}
    save(wrapped, tmp_path / "first", **how)
    load(plain, tmp_path / "first")
    x = torch.randn(5, 128, dtype=torch.bfloat16)
    assert torch.equal(plain["block"]["experts"](x, [2, 3]), layer(x, [2, 3]))  # type: ignore[index]
    layer, wrapped, _ = models()
    if kind != "shards":  # which are of values alone
        save_checkpoint(plain, tmp_path / "second", quantized=kind == "codes")
    load(wrapped, tmp_path / ("first" if kind == "shards" else "second"))
    assert torch.equal(plain["block"]["experts"](x, [2, 3]), layer(x, [2, 3]))  # type: ignore[index]


def test_names_of_recipes_and_of_exported_experts() -> None:
    """Without the wrapper's part, which no other program knows."""
    _, wrapped, plain = models()
    assert [*recipe_state(wrapped)] == [*recipe_state(plain)] == ["block.experts.recipe_fingerprint"]
    names = [name for name, _ in expert_tensors(wrapped, "hf-fp8", prefix="model.")]
    assert names == [name for name, _ in expert_tensors(plain, "hf-fp8", prefix="model.")]
    assert names[0].startswith("model.block.experts.0.")

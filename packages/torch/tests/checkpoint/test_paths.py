"""A path at which nothing can be read or written is told of as the argument that it is."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

from octavo_torch import GroupedMLP, export_experts, load_checkpoint, load_experts, save_checkpoint

Function = Callable[[nn.Module, Path | str], object]
FUNCTIONS: dict[str, Function] = {
    "load_experts": load_experts,
    "load_checkpoint": load_checkpoint,
    "save_checkpoint": save_checkpoint,
    "export_experts": partial(export_experts, layout="hf-fp8"),
}


@pytest.fixture(scope="module")
def experts() -> GroupedMLP:
    return GroupedMLP(
        2, 16, 32, activation="swiglu", recipe="fp8-block", backend="torch-reference", dtype=torch.bfloat16
    )


@pytest.mark.parametrize("path", ["", "x" * 5000, "\ud800"], ids=["empty", "long", "surrogate"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_path_of_no_file_system_is_refused(name: str, path: str, experts: GroupedMLP) -> None:
    """In one line with the argument's name, where open() would raise what it is asked for."""
    with pytest.raises(ValueError, match=r"^(path|folder) is .*; give (another path|a pathlib.Path or a str)$"):
        FUNCTIONS[name](experts, path)


def test_a_folder_without_tensors_is_named(experts: GroupedMLP, tmp_path: Path) -> None:
    """A folder that is there and has no model is another mistake than one that is not there."""
    with pytest.raises(
        ValueError, match=r"^path is the folder .*, which has no model.safetensors.index.json and 0 files"
    ):
        load_experts(experts, tmp_path)


@pytest.mark.parametrize("name", ["load_experts", "load_checkpoint", "save_checkpoint"])
def test_without_safetensors_it_is_said_what_to_install(
    name: str, experts: GroupedMLP, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The package is an extra: nothing else needs it."""
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match=r"safetensors is not installed; pip install safetensors$"):
        FUNCTIONS[name](experts, tmp_path if name == "load_experts" else file)

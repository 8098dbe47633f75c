"""Checkpoints of earlier releases load: torch's state dict, files of values and of codes, sharded folders."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import octavo_torch

GOLDEN = Path(__file__).parents[1] / "golden"
RELEASES = sorted(folder.name for folder in GOLDEN.iterdir() if folder.is_dir() and folder.name != "__pycache__")


def _writer() -> Any:
    spec = importlib.util.spec_from_file_location("golden_write", GOLDEN / "write.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


WRITER = _writer()
every_case = pytest.mark.parametrize("name", WRITER.RECIPES)
every_release = pytest.mark.parametrize("release", RELEASES)


def fresh(name: str) -> nn.ModuleDict:
    """The module of the golden files with other values, as a new job makes it."""
    module: nn.ModuleDict = WRITER.module_of(WRITER.RECIPES[name], seed=99)
    return module.eval()


def step(module: nn.ModuleDict, x: Tensor) -> list[Tensor]:
    """A training step's gradients and the arrays that the module then holds."""
    module.train()
    WRITER.run(module, x).float().square().sum().backward()
    octavo_torch.update_scales(module)
    return [parameter.grad for parameter in module.parameters()] + [
        array.clone() for array in module.state_dict().values()
    ]


@every_release
@every_case
def test_three_forms_of_one_module_load_as_one(release: str, name: str) -> None:
    """Weights, biases, seeds, counters and histories of torch.load, load_checkpoint (which compares each array with
    the digest that the release stored) and load_distributed are the same bits; then all go on with the same step."""
    folder = GOLDEN / release
    loaded = [fresh(name) for _ in range(3)]
    loaded[0].load_state_dict(torch.load(folder / f"{name}.pt", weights_only=True))
    octavo_torch.load_checkpoint(loaded[1], folder / f"{name}.safetensors")
    octavo_torch.load_distributed(loaded[2], folder / f"{name}-sharded")
    x = torch.randn(sum(WRITER.SIZES), WRITER.K, dtype=torch.bfloat16)
    first, *others = (
        [*(array.clone() for array in module.state_dict().values()), *step(module, x)] for module in loaded
    )
    assert first
    for other in others:
        assert all(torch.equal(left, right) for left, right in zip(first, other, strict=True))
    untouched = fresh(name)
    assert not torch.equal(untouched["fc"].weight, first[0])


@every_release
@every_case
def test_codes_are_those_of_the_values(release: str, name: str) -> None:
    """What a release quantized gives the result of today's quantizer on the values that it saved beside."""
    if name == "bf16":
        assert not list((GOLDEN / release).glob("bf16-codes*"))
        return
    values, codes = fresh(name), fresh(name)
    octavo_torch.load_checkpoint(values, GOLDEN / release / f"{name}.safetensors")
    octavo_torch.load_checkpoint(codes, GOLDEN / release / f"{name}-codes.safetensors")
    x = torch.randn(sum(WRITER.SIZES), WRITER.K, dtype=torch.bfloat16)
    with torch.no_grad():
        assert torch.equal(WRITER.run(codes, x), WRITER.run(values, x))


def test_this_release_has_its_files() -> None:
    """A new version comes with files: `python packages/torch/tests/golden/write.py` writes them."""
    assert octavo_torch.__version__ in RELEASES

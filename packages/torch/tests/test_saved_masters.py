"""MasterWeights and what is stored: codes that they start from, runs that go on, checkpoints, frozen weights."""

from __future__ import annotations

import copy
import operator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from code_planes import planes
from master_layers import SIZES, F, K, M, make, values_of
from torch import nn

from octavo_torch import (
    AdamW,
    CodedWeight,
    GroupedMLP,
    MasterWeights,
    dequantize,
    load_checkpoint,
    load_distributed,
    quantize_before_gather,
    save_checkpoint,
    save_distributed,
)


def test_masters_start_from_what_the_codes_stand_for(rng: np.random.Generator) -> None:
    """Without values: their rows as fprop reads them, in the order of the module's weight, where gate and up rows may
    take turns."""
    for recipe in ("mxfp8", "fp8-block", "fp8-row", "nvfp4"):
        model = make(recipe, interleave=16)
        first, second = MasterWeights(model).parameters()
        assert isinstance(model.weight1, CodedWeight)
        assert isinstance(model.weight2, CodedWeight)
        gate, up = dequantize(model.weight1.codes).chunk(2, dim=1)
        for block in range(F // 16):
            rows = slice(16 * block, 16 * block + 16)
            assert torch.equal(first[:, 32 * block : 32 * block + 16], gate[:, rows])
            assert torch.equal(first[:, 32 * block + 16 : 32 * block + 32], up[:, rows])
        assert first.dtype is torch.float32
        assert torch.equal(second, dequantize(model.weight2.codes))


def test_a_saved_run_goes_on_bit_for_bit(rng: np.random.Generator) -> None:
    """State dicts of model, masters and optimizer: the step after loading is the step without a pause."""

    def run(model: GroupedMLP, optimizer: torch.optim.Optimizer) -> None:
        model(x, SIZES).backward(dy)
        optimizer.step()
        optimizer.zero_grad()

    x, dy = torch.randn(M, K).bfloat16(), torch.randn(M, K).bfloat16()
    made = []
    for _ in range(2):
        model = make("fp8-block", bias=True)
        masters = MasterWeights(model, torch.bfloat16)
        optimizer = torch.optim.AdamW(masters.all_parameters(), lr=1e-2)
        masters.follow(optimizer)
        made.append((model, masters, optimizer))
    (model, masters, optimizer), later = made
    run(model, optimizer)
    saved = [copy.deepcopy(part.state_dict()) for part in (model, masters, optimizer)]
    run(model, optimizer)
    for part, state in zip(later, saved, strict=True):
        part.load_state_dict(state)
    run(later[0], later[2])
    assert all(map(torch.equal, masters.parameters(), later[1].parameters()))
    assert all(map(torch.equal, planes(model.weight1), planes(later[0].weight1)))
    assert torch.equal(model.bias1, later[0].bias1)  # type: ignore[arg-type]


def test_checkpoints_hold_masters_or_codes(rng: np.random.Generator, tmp_path: Path) -> None:
    """Sharded checkpoints hold values, so the masters; files hold codes, too; each comes back bit for bit."""
    model, other = make("fp8-block"), make("fp8-block")
    masters, others = MasterWeights(model), MasterWeights(other)
    for refused in (save_distributed, load_distributed):
        with pytest.raises(ValueError, match="weight1 is codes of recipe block alone"):
            refused(model, tmp_path / "model")
    with pytest.raises(ValueError, match="weight1 is codes alone, and FSDP2 shards values"):
        quantize_before_gather(model)
    save_distributed(masters, tmp_path / "masters")
    load_distributed(others, tmp_path / "masters")
    others.write()
    assert all(map(torch.equal, masters.parameters(), others.parameters()))
    masters.write()
    assert all(map(torch.equal, planes(model.weight1), planes(other.weight1)))
    third = make("fp8-block")
    save_checkpoint(model, tmp_path / "codes", quantized=True)
    load_checkpoint(third, tmp_path / "codes")
    assert all(map(torch.equal, planes(model.weight1), planes(third.weight1)))


@pytest.mark.parametrize("follower", ["MasterWeights", "AdamW"])
def test_a_run_goes_on_from_a_checkpoint_of_codes(follower: str, rng: np.random.Generator, tmp_path: Path) -> None:
    """load_checkpoint writes codes into the parameters that are there, tied ones, too: what steps them goes on bit for
    bit, and they still take a gradient."""

    def begin() -> tuple[nn.ModuleList, nn.Module, torch.optim.Optimizer]:
        layers = nn.ModuleList([make("fp8-block"), make("fp8-block")])
        layers[1].weight2 = layers[0].weight2
        if follower == "AdamW":
            return layers, nn.Module(), AdamW(layers.parameters(), lr=1e-2)
        masters = MasterWeights(layers)
        optimizer = torch.optim.AdamW(masters.all_parameters(), lr=1e-2)
        masters.follow(optimizer)
        return layers, masters, optimizer

    def run(layers: nn.ModuleList, optimizer: torch.optim.Optimizer) -> None:
        for layer in layers:
            layer(x, SIZES).backward(dy)
        optimizer.step()
        optimizer.zero_grad()

    x, dy = torch.randn(M, K).bfloat16(), torch.randn(M, K).bfloat16()
    layers, masters, optimizer = begin()
    run(layers, optimizer)
    save_checkpoint(layers, tmp_path / "codes")
    state, values = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(masters.state_dict())
    run(layers, optimizer)
    others, other_masters, other_optimizer = begin()
    before = [*others.parameters()]
    load_checkpoint(others, tmp_path / "codes")
    assert all(map(operator.is_, before, others.parameters()))
    assert all(parameter.requires_grad for parameter in before)
    other_masters.load_state_dict(values)
    other_optimizer.load_state_dict(state)
    run(others, other_optimizer)
    for mine, theirs in zip(layers.parameters(), others.parameters(), strict=True):
        assert all(map(torch.equal, planes(mine), planes(theirs)))


@pytest.mark.parametrize("follower", ["MasterWeights", "AdamW"])
def test_codes_of_frozen_weights_stay(follower: str, rng: np.random.Generator) -> None:
    """Codes need not be those of the values that they stand for, such as a file's and MXFP8's columns: steps of other
    weights, saved states and given values that are these leave a frozen weight's as they are."""
    model, x = make("mxfp8", bias=True), torch.randn(M, K).bfloat16()
    model.weight2.requires_grad_(False)
    before, first = [plane.clone() for plane in planes(model.weight2)], planes(model.weight1)[0].clone()

    def step(optimizer: torch.optim.Optimizer) -> None:
        model(x, SIZES).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    values = {"weight2": values_of(model.weight2)}
    if follower == "AdamW":
        optimizer: torch.optim.Optimizer = AdamW(model.parameters(), 0.1, masters={model.weight2: values["weight2"]})
        step(optimizer)
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    else:
        masters = MasterWeights(model, values=values)
        optimizer = torch.optim.AdamW(masters.all_parameters(), 0.1)
        masters.follow(optimizer)
        step(optimizer)
        masters.load_state_dict(copy.deepcopy(masters.state_dict()))
    step(optimizer)
    assert all(map(torch.equal, planes(model.weight2), before))
    assert not torch.equal(planes(model.weight1)[0], first)


@pytest.mark.parametrize("early", [True, False])
@pytest.mark.parametrize("main_grad", [None, "accumulate"])
def test_codes_stay_from_when_a_weight_is_frozen(early: bool, main_grad: Any, rng: np.random.Generator) -> None:
    """Its master has a gradient from before, zeros alone, with which an optimizer would let it decay."""
    model, x = make("fp8-block", main_grad=main_grad), torch.randn(M, K).bfloat16()
    masters = MasterWeights(model)
    optimizer = torch.optim.AdamW(masters.all_parameters(), 0.1)
    masters.follow(optimizer)
    for step in range(3):
        model(x, SIZES).float().square().mean().backward()
        optimizer.step()
        if step == 0:
            before = [[plane.clone() for plane in planes(weight)] for weight in (model.weight1, model.weight2)]
        model.weight2.requires_grad_(not early)
        optimizer.zero_grad(set_to_none=False)
        model.weight2.requires_grad_(False)
    assert all(map(torch.equal, planes(model.weight2), before[1]))
    assert not all(map(torch.equal, planes(model.weight1), before[0]))
    model.weight2.requires_grad_(True)
    model(x, SIZES).float().square().mean().backward()
    optimizer.step()
    assert not all(map(torch.equal, planes(model.weight2), before[1]))

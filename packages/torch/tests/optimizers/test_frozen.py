"""AdamW keeps nothing of a frozen parameter, and goes on where one is thawed, also from a saved state."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

from octavo_torch import AdamW
from octavo_torch.optimizers import adamw


def pair() -> nn.Linear:
    """A frozen matrix in bf16, which needs a master, and a bias that trains."""
    layer = nn.Linear(130, 6).bfloat16()
    layer.weight.requires_grad_(False)
    return layer


def step(layer: nn.Linear, optimizer: AdamW, x: torch.Tensor) -> None:
    layer(x).float().square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def tensors(layer: nn.Linear, optimizer: AdamW) -> list[torch.Tensor]:
    """The parameters, and the states of those that have one."""
    parameters = list(layer.parameters())
    return [*parameters, *(value for p in parameters for value in optimizer.state[p].values())]


@pytest.mark.parametrize("state_bits", [32, 8])
def test_a_frozen_parameter_costs_nothing_until_it_is_thawed(state_bits: int, rng: np.random.Generator) -> None:
    """Frozen experts, PackedWeights of 4 bits among them, cost 12 bytes per element. A thawed parameter steps
    as with an optimizer that was created then."""
    layer, x = pair(), torch.randn(3, 130).bfloat16()
    optimizer = AdamW(layer.parameters(), lr=0.1, state_bits=state_bits)
    step(layer, optimizer, x)
    assert [*optimizer.state] == [layer.bias]
    assert [*optimizer.state_dict()["state"]] == [1]
    other = copy.deepcopy(layer)
    layer.weight.requires_grad_(True)
    other.weight.requires_grad_(True)
    later = AdamW([other.weight], lr=0.1, state_bits=state_bits)
    x = torch.randn(3, 130).bfloat16()
    step(layer, optimizer, x)
    step(other, later, x)
    assert torch.equal(layer.weight, other.weight)
    assert all(
        torch.equal(value, later.state[other.weight][key]) for key, value in optimizer.state[layer.weight].items()
    )
    layer.weight.requires_grad_(False)
    step(layer, optimizer, x)
    assert torch.equal(layer.weight, other.weight)


def test_states_of_frozen_parameters_are_saved_and_loaded_where_there_are_some(rng: np.random.Generator) -> None:
    """A file that has one, such as of an optimizer that made all, is loaded whole, and one that has none fits, too."""
    layer, x = pair(), torch.randn(3, 130).bfloat16()
    other = copy.deepcopy(layer)
    without = copy.deepcopy(AdamW(layer.parameters()).state_dict())
    layer.weight.requires_grad_(True)
    optimizer = AdamW(layer.parameters(), lr=0.1)
    step(layer, optimizer, x)
    layer.weight.requires_grad_(False)
    saved = optimizer.state_dict()
    other.load_state_dict(layer.state_dict())
    loaded = AdamW(other.parameters(), lr=0.1)
    wrong = copy.deepcopy(saved)
    wrong["state"][0]["exp_avg"] = torch.zeros(2)
    with pytest.raises(ValueError, match=r"exp_avg of params\[0\]\[0\] is float32 \[2\]"):
        loaded.load_state_dict(wrong)
    assert [*loaded.state] == [other.bias]
    loaded.load_state_dict(saved)
    for one in (layer, other):
        one.weight.requires_grad_(True)
    step(layer, optimizer, x)
    step(other, loaded, x)
    assert all(map(torch.equal, tensors(layer, optimizer), tensors(other, loaded)))
    loaded.load_state_dict(without)
    assert loaded.state[other.weight]["step"] == 0
    assert not loaded.state[other.weight]["exp_avg"].any()


def test_torchs_tools_find_the_state_of_a_thawed_parameter(rng: np.random.Generator) -> None:
    """torch.distributed.checkpoint asks for one of whatever requires a gradient, stepped or not."""
    layer, x = pair(), torch.randn(3, 130).bfloat16()
    optimizer = AdamW(layer.named_parameters(), lr=0.1)
    step(layer, optimizer, x)
    frozen: Any = get_optimizer_state_dict(layer, optimizer)
    assert [*frozen["state"]] == ["bias"]
    layer.weight.requires_grad_(True)
    thawed: Any = get_optimizer_state_dict(layer, optimizer)
    assert sorted(thawed["state"]) == ["bias", "weight"]
    saved = copy.deepcopy(thawed)  # torch gives the tensors themselves
    step(layer, optimizer, x)
    set_optimizer_state_dict(layer, optimizer, saved)
    assert optimizer.state[layer.weight]["step"] == 0
    assert optimizer.state[layer.bias]["step"] == 1


def test_masters_of_frozen_parameters_are_kept(rng: np.random.Generator) -> None:
    """Whoever gives values of a master wants them there when the parameter is thawed."""
    layer, values = pair(), torch.randn(6, 130)
    optimizer = AdamW(layer.parameters(), masters={layer.weight: values})
    assert torch.equal(optimizer.state[layer.weight]["master"], values)
    assert torch.equal(layer.weight, values.bfloat16())


def test_no_state_is_made_in_a_captured_graph(rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each replay would begin it again."""
    weight = nn.Parameter(torch.randn(4, 5), requires_grad=False)
    optimizer = AdamW([weight, nn.Parameter(torch.randn(3))], capturable=True)
    weight.requires_grad_(True).grad = torch.randn(4, 5)
    with monkeypatch.context() as patch:
        patch.setattr(adamw, "is_capturing", lambda: True)
        patch.setattr(nn.Parameter, "is_cuda", True)
        with pytest.raises(ValueError, match=r"params\[0\]\[0\] was frozen when .* call state_dict\(\)"):
            optimizer.step()
    optimizer.state_dict()
    optimizer.step()
    assert optimizer.state[weight]["step"] == 1

"""Optimizers whose kernels change parameters uncounted: codes of before their step are refused all the same."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

from octavo_torch import GroupedLinear

G, K, N = 2, 64, 32
SIZES = [4, 5]
FUSED: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": lambda params: torch.optim.AdamW(params, fused=True),
    "SGD": lambda params: torch.optim.SGD(params, lr=0.1, fused=True),
    "a list, counted": lambda params: torch.optim.AdamW(params, foreach=True),
}


def layer(**options: Any) -> Any:
    return GroupedLinear(G, K, N, backend="torch-reference", **{"recipe": "mxfp8", **options})


@pytest.mark.parametrize("per_group", [False, True])
@pytest.mark.parametrize("name", FUSED)
def test_codes_of_before_a_step_are_refused(name: str, per_group: bool, rng: object) -> None:
    """Those of a copy, too; codes that are made or written again serve, and nobody else's versions change."""
    made, other = layer(per_group_parameters=per_group), torch.nn.Parameter(torch.ones(3))
    optimizer, x = FUSED[name]([*made.parameters(), other]), torch.randn(9, K)
    codes = made.quantize_weight()
    for _ in range(2):
        made(x, SIZES, weight=codes).sum().backward()
        twin = copy.deepcopy(codes)
        other.grad = None if "counted" in name else torch.ones(3)
        optimizer.step()
        optimizer.zero_grad()
        with pytest.raises(ValueError, match="weight has changed in place since quantize_weight"):
            made(x, SIZES, weight=codes)
        assert not twin.outdated
        made.quantize_weight(out=codes)
        assert torch.equal(made(x, SIZES, weight=codes), made(x, SIZES))
    assert other._version == 0


def test_a_step_that_leaves_a_weight_out_keeps_its_codes(rng: object) -> None:
    """A parameter without a gradient, and one of another optimizer."""
    made, x = layer(), torch.randn(9, K)
    codes = made.quantize_weight()
    FUSED["AdamW"](made.parameters()).step()
    made(x, SIZES, weight=codes).sum().backward()
    leaf = torch.nn.Parameter(torch.ones(3))
    leaf.grad = torch.ones(3)
    FUSED["AdamW"]([leaf]).step()
    assert torch.equal(made(x, SIZES, weight=codes), made(x, SIZES))


def test_scales_that_nobody_computes_are_noticed(rng: object) -> None:
    """The warning of delayed scaling counts steps, fused ones, too."""
    made = layer(recipe="fp8-delayed")
    optimizer = FUSED["AdamW"](made.parameters())

    def steps() -> None:
        for _ in range(10):
            made(torch.randn(9, K), SIZES).sum().backward()
            optimizer.step()

    with pytest.warns(UserWarning, match="has recorded amax over 8 changes of its weight"):
        steps()


@pytest.mark.parametrize("recipe", ["mxfp8", "fp8-delayed"])
def test_watched_weights_can_be_swapped(recipe: str, rng: object) -> None:
    """A module that has made steps is converted, and loads a checkpoint, where torch swaps tensors for both: it refuses
    to swap a tensor that something refers to weakly."""
    made = layer(recipe=recipe)
    optimizer = FUSED["AdamW"](made.parameters())
    made.quantize_weight()
    for _ in range(2):
        made(torch.randn(9, K), SIZES).sum().backward()
        optimizer.step()
    values = {name: value.clone() for name, value in made.state_dict().items()}
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        made.double().float().load_state_dict(values)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    assert all(torch.equal(value, values[name]) for name, value in made.state_dict().items())

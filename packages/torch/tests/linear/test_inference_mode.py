"""Codes that are made in torch.inference_mode, whose tensors count no changes in place."""

from __future__ import annotations

from copy import deepcopy

import numpy as np
import pytest
import torch

from octavo_torch import GroupedLinear, GroupedMLP, quantized_parameters

G, K, N = 2, 64, 48
SIZES = torch.tensor([3, 5])


def linear(recipe: str) -> GroupedLinear:
    return GroupedLinear(G, K, N, recipe=recipe, backend="torch-reference")


@pytest.mark.parametrize("recipe", ["fp8-block", "fp8-delayed"])
def test_operands_quantized_once(recipe: str, rng: np.random.Generator) -> None:
    """Rows, and weights of a layer that was made there or before, have the bits of a call that quantizes them."""
    before, x = linear(recipe), torch.randn(8, K)
    expected = before(x, SIZES)
    with torch.inference_mode():
        inside = linear(recipe)
        inside.load_state_dict(before.state_dict())
        x = x.clone()  # one of this mode
        for layer in (before, inside):
            weight = layer.quantize_weight()
            rows = layer.quantize_input(x, SIZES)
            assert torch.equal(layer(rows, None, weight=weight), expected)
            assert torch.equal(layer(deepcopy(rows), None), expected)
            assert torch.equal(layer(x, SIZES, weight=layer.quantize_weight(out=weight)), expected)


def test_a_layer_of_codes_alone(rng: np.random.Generator) -> None:
    """It is made, loaded and given new values in the mode, as one that serves a model is."""
    with quantized_parameters("fp8-block"):
        before = GroupedMLP(G, K, N, backend="torch-reference")
        x = torch.randn(8, K)
        expected = before(x, SIZES)
        with torch.inference_mode():
            inside = GroupedMLP(G, K, N, backend="torch-reference")
            inside.load_state_dict(before.state_dict())
            assert torch.equal(inside(x, SIZES), expected)
            inside.weight1.copy_(torch.randn(inside.weight1.shape))
            assert not torch.equal(inside(x, SIZES), expected)

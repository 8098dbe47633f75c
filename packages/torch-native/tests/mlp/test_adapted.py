"""Adapters beside an MLP's weights: what stands between its products is still one launch."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch import Tensor

from octavo_torch import GroupedMLP, add_lora, quantized_parameters
from octavo_torch.mlp import between

G, K, F = 4, 80, 72


@pytest.mark.parametrize("activation", ["swiglu", "gelu_tanh", "clamped_swiglu"])
@pytest.mark.parametrize("recipe", ["fp8-block", "mxfp8", "fp8-row"])
def test_an_adapted_mlp_computes_its_activation_in_one_pass(
    recipe: str, activation: str, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """New adapters change no bit of y, and of the gradients of x and probs: the kernels that a fused quantizer starts
    with compute the activation and its gradient, and none of torch's operations do."""
    with quantized_parameters(recipe):
        plain = GroupedMLP(G, K, F, activation=activation, dtype=torch.bfloat16, backend="torch-native", seed=1)
    adapted = copy.deepcopy(plain)
    add_lora(adapted, 8)

    def composed(*_: object, **__: object) -> Tensor:
        raise AssertionError("the activation is composed")

    monkeypatch.setattr(between, "activate", composed)
    monkeypatch.setattr(between, "activate_gradient", composed)
    sizes = [int(size) for size in rng.multinomial(50, [1 / G] * G)]
    rows, dy = torch.randn(53, K).bfloat16(), torch.randn(53, K).bfloat16()
    rows[50:], dy[50:] = torch.nan, torch.nan
    passed = []
    for module in (plain, adapted):
        x, probs = rows.clone().requires_grad_(), torch.rand(53).requires_grad_()
        with torch.no_grad():
            probs.copy_(torch.linspace(0, 1, 53))
        y = module(x, sizes, probs=probs)
        passed.append([y, *torch.autograd.grad(y, [x, probs], dy)])
    for ours, theirs in zip(*passed, strict=True):
        assert torch.equal(ours[:50], theirs[:50])
        assert bool(ours[:50].any())

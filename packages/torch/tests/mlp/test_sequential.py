"""Sequential and Activation: fused runs have the bits of their operations in a row, and it says what it fused."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from octavo import MXFP8, NVFP4, BlockScaling, DelayedScaling, HighPrecision, Recipe
from octavo_torch import Activation, GroupedLinear, GroupedMLP, Sequential, activate, update_scales
from octavo_torch.functions.activations import ACTIVATIONS

SIZES = torch.tensor([20, 0, 40])
M, K, F, N, G = 70, 64, 48, 80, len(SIZES)
RECIPES: tuple[Recipe, ...] = (HighPrecision(), DelayedScaling(history=3), MXFP8(), NVFP4())


def layer(inputs: int, outputs: int, recipe: Recipe, seed: int = 0, **rest: Any) -> GroupedLinear:
    return GroupedLinear(
        G, inputs, outputs, bias=True, recipe=recipe, dtype=torch.bfloat16, seed=seed, backend="torch-reference", **rest
    )


def experts(recipe: Recipe) -> Sequential:
    return Sequential(layer(K, 2 * F, recipe, 1), Activation("geglu"), layer(F, N, recipe, 2))


def in_a_row(model: Sequential, x: Tensor, sizes: Tensor, probs: Tensor) -> Tensor:
    first, activation, second = model.operations
    result: Tensor = second(activation(first(x, sizes), probs), sizes)
    return result


def train(model: Sequential, forward: Any, data: list[tuple[Tensor, ...]]) -> list[Tensor]:
    seen: list[Tensor] = []
    for x, probs, dy in data:
        model.zero_grad()
        leaves = x.clone().requires_grad_(), probs.clone().requires_grad_()
        y = forward(model, leaves[0], SIZES, leaves[1])
        y.backward(dy)
        update_scales(model)
        seen += [y.detach(), *(value.grad for value in (*leaves, *model.parameters()) if value.grad is not None)]
        seen += [buffer.clone() for buffer in model.buffers()]
    return seen


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.kind)
def test_a_fused_run_has_the_bits_of_its_operations(recipe: Recipe, rng: np.random.Generator) -> None:
    """y, gradients, scales and seed counters of two steps; each layer draws from its own seed."""
    model = experts(recipe)
    assert [(step.first, step.last) for step in model.steps()] == [(0, 2)]
    data = [(torch.randn(M, K).bfloat16(), torch.rand(M), torch.randn(M, N).bfloat16()) for _ in range(2)]
    theirs = train(copy.deepcopy(model), in_a_row, data)
    ours = train(model, lambda model, *arguments: model(*arguments), data)
    assert len(ours) == len(theirs)
    for left, right in zip(ours, theirs, strict=True):
        assert torch.equal(left, right)


def test_one_graph(rng: np.random.Generator) -> None:
    """fullgraph with the bits of eager, an operation of torch's own in between."""
    model = Sequential(nn.Linear(K, K, dtype=torch.bfloat16), *experts(MXFP8()).operations)
    x, probs = torch.randn(M, K).bfloat16(), torch.rand(M)
    torch.compiler.reset()
    assert torch.equal(
        torch.compile(model, fullgraph=True, backend="aot_eager")(x, SIZES, probs), model(x, SIZES, probs)
    )


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activation_has_its_gradients(name: str, rng: np.random.Generator) -> None:
    """The module is the function; gradients are there for what asks for them."""
    x, probs = torch.randn(5, 8, requires_grad=True), torch.rand(5, requires_grad=True)
    y = Activation(name)(x, probs)
    assert torch.equal(y, activate(x.detach(), name, probs=probs.detach()))
    dx, dprobs = torch.autograd.grad(y.sum(), (x, probs))
    torch.testing.assert_close(dprobs * probs, y.sum(1))
    assert torch.equal(torch.autograd.grad(activate(x, name, probs=probs.detach()).sum(), x)[0], dx)


def test_it_says_what_it_fused(rng: np.random.Generator) -> None:
    """A line a step, with the reason wherever three operations nearly run as one."""
    x = torch.randn(M, K).bfloat16()
    told = experts(MXFP8()).explain(x, SIZES)
    assert "0 GroupedLinear + 1 geglu + 2 GroupedLinear: one grouped_mlp" in told
    assert "gradient and quantize: composed: no backend serves dact_quantize" in told
    gelu = Activation("gelu")
    row = layer(K, F, MXFP8())
    reasons = [
        ((row, gelu, layer(F, N, BlockScaling())), "the recipes are mxfp8"),
        ((row, gelu), "no GroupedLinear follows gelu"),
        (
            (row, Activation("swiglu"), layer(F, N, MXFP8())),
            "swiglu reads 96 features and the layer before it makes 48",
        ),
        ((row, gelu, layer(F, N, MXFP8(), main_grad="overwrite")), "main_grad is None and 'overwrite'"),
        ((row, gelu, layer(F, N, MXFP8()).eval()), "training is True and False"),
    ]
    for operations, reason in reasons:
        assert f"0 GroupedLinear: not fused, {reason}" in Sequential(*operations).explain(x, SIZES)
    watched = experts(MXFP8())
    watched.operations[0].register_forward_hook(lambda *_: None)
    assert "a module has hooks" in watched.explain(x, SIZES)


def test_messages(rng: np.random.Generator) -> None:
    """Errors name the argument, what was given, and what is needed."""
    with pytest.raises(ValueError, match="operation 1 is a str; give modules"):
        Sequential(Activation(), "swiglu")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="there are 2 activations; give it with one"):
        Sequential(Activation("silu"), GroupedMLP(G, 4, 4))(torch.randn(60, 4), SIZES, torch.rand(60))
    with pytest.raises(ValueError, match="activation is 'tanh'"):
        Activation("tanh")
    with pytest.raises(ValueError, match="x has 7 columns and swiglu reads"):
        activate(torch.randn(3, 7), "swiglu")
    with pytest.raises(ValueError, match=r"probs has shape \[2\]; give \[3\]"):
        activate(torch.randn(3, 8), "swiglu", probs=torch.rand(2))

"""Adapters over weights that are codes alone: the bits of values, what is kept and computed, and how a step is run."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
import torch
from lora_modules import MODULES, REFERENCE, SIZES, F, G, K, M, called, made, passed, randomize, rows
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from octavo import PRESETS, BlockScaling
from octavo_torch import (
    CodedWeight,
    GroupedLinear,
    GroupedMLP,
    MoE,
    activate,
    add_lora,
    grouped_linear,
    permute,
    quantized_parameters,
    unpermute,
)

CODES = ("mxfp8", "fp8-block", "fp8-row", "fp8-current", "nvfp4")


def parts_in_a_row(module: Any, x: Tensor) -> Tensor:
    """The module's result of public functions: rows, products, adapters, activation."""
    how: dict[str, Any] = {"recipe": module.recipe, "backend": REFERENCE, "seed": 0}
    if isinstance(module, GroupedLinear):
        return grouped_linear(x, module.weight, SIZES, bias=module.bias, **how) + module.lora(x, SIZES)
    probs, routing, sizes, tokens = None, None, torch.tensor(SIZES), x
    if isinstance(module, MoE):
        choice = module.choose(x)
        tokens, sizes, routing = permute(x, choice.choices, G, backend=REFERENCE)
        probs = routing.to_rows(choice.weights, backend=REFERENCE)
    h = grouped_linear(tokens, module.weight1, sizes, bias=module.bias1, **how) + module.lora1(tokens, sizes)
    a = activate(h, "swiglu", probs=probs)
    y = grouped_linear(a, module.weight2, sizes, bias=module.bias2, bias_scales=probs, **how) + module.lora2(a, sizes)
    return y if routing is None else unpermute(y, routing, backend=REFERENCE)


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize("recipe", CODES)
def test_frozen_codes_train_what_is_around_them(name: str, recipe: str, rng: np.random.Generator) -> None:
    """Codes alone give the bits of values, and both those of the operations in a row: y, and the gradients of x and of
    every adapter, none of them zero; the weights get none, and codes stay the only copy of them."""
    plain = {"interleave": None} if name == "GroupedMLP" else {}
    seed = int(rng.integers(1 << 31))
    torch.manual_seed(seed)
    with quantized_parameters(recipe):
        module = made(name, **plain)
    torch.manual_seed(seed)
    valued = made(name, recipe=recipe, **plain)
    for one in (module, valued):
        add_lora(one, 8, alpha=16)
    own = randomize(module)
    for ours, theirs in zip((p for n, p in valued.named_parameters() if "lora_" in n), own, strict=True):
        ours.data.copy_(theirs)
    x, dy = rows(name != "MoE"), torch.randn(M, K)
    results = []
    for one, function in ((module, called), (valued, called), (module, parts_in_a_row)):
        y = function(one, x)
        inputs = [x, *(p for n, p in one.named_parameters() if "lora_" in n)]
        results.append([y, *torch.autograd.grad(y, inputs, dy[:, : y.shape[1]].bfloat16())])
    stochastic = PRESETS[recipe].stochastic  # counters of modules and a seed do not round alike
    for ours, theirs, third in zip(*results, strict=True):
        assert torch.equal(ours, theirs)
        assert stochastic or torch.equal(ours, third)
    assert all(bool(grad.any()) for grad in results[0][1:])
    weights = [p for n, p in module.named_parameters() if n.startswith("weight")]
    assert weights
    assert all(isinstance(weight, CodedWeight) and weight.grad is None for weight in weights)


def bytes_of(saved: list[Tensor]) -> int:
    return sum({value.untyped_storage().data_ptr(): value.untyped_storage().nbytes() for value in saved}.values())


@pytest.mark.parametrize("recipe", ["fp8-block", "mxfp8"])
def test_what_is_kept_of_frozen_codes(recipe: str, rng: np.random.Generator) -> None:
    """For the backward: no copy of a weight in any precision, x once, h, a, and two narrow products; codes are a byte
    an element of each plane."""
    groups, columns, hidden, m = 4, 256, 128, 64
    with quantized_parameters(recipe):
        module = GroupedMLP(groups, columns, hidden, dtype=torch.bfloat16, backend=REFERENCE)
    held = sum(p.codes.nbytes() for p in module.parameters())  # type: ignore[attr-defined]
    values = sum(p.numel() for p in module.parameters())
    planes = 1 if recipe == "fp8-block" else 2
    assert values * planes <= held <= values * planes * 1.04
    add_lora(module, 16)
    randomize(module)
    own = {p.untyped_storage().data_ptr() for p in module.parameters() if not isinstance(p, CodedWeight)}
    for weight in (module.weight1, module.weight2):
        own |= {getattr(weight, name).untyped_storage().data_ptr() for name in weight.__tensor_flatten__()[0]}  # type: ignore[attr-defined]
    saved: list[Tensor] = []
    x = torch.randn(m, columns).bfloat16().requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda value: saved.append(value) or value, lambda value: value):  # type: ignore[func-returns-value]
        y = module(x, [10, 0, 40, 14])
    fresh = [value for value in saved if value.untyped_storage().data_ptr() not in own]
    narrow = 2 * 16
    assert bytes_of(fresh) <= 2 * m * (columns + 2 * hidden + hidden + narrow) + 1024
    assert bytes_of([x]) == 2 * m * columns
    y.sum().backward()


def test_nothing_is_computed_for_weights(rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """A frozen layer asks its backend for no wgrad, nor for the codes that one would read."""
    from octavo_torch.dispatch.layer import Layer

    asked: list[tuple[bool, bool]] = []
    resolve = Layer.__init__

    def record(self: Layer, *given: Any) -> None:
        resolve(self, *given)
        if self.recipe.kind == "block":
            asked.append((self.wgrad is not None, "columnwise" in self.quantizers["x"].request.quantizer.directions))

    monkeypatch.setattr(Layer, "__init__", record)
    recipe = BlockScaling(amax_epsilon=float(rng.random()))  # a recipe that no test has resolved
    with quantized_parameters(recipe):
        module = GroupedMLP(G, K, F, dtype=torch.bfloat16, backend=REFERENCE)
    add_lora(module, 8)
    asked.clear()
    module(rows(), SIZES).sum().backward()
    assert asked == [(False, False), (False, False)]


@pytest.mark.parametrize("name", MODULES)
def test_recomputed_compiled_and_stored(name: str, rng: np.random.Generator) -> None:
    """Activation checkpointing, MoE's own form "recompute", torch.compile in one graph, and a state dict that
    torch.save has written: each has the same bits."""
    with quantized_parameters("fp8-block"):
        module = made(name)
    add_lora(module, 8, alpha=16)
    own = randomize(module)
    x, dy = rows(name != "MoE"), torch.randn(M, K)
    wanted = passed(module, x, dy, [x, *own])
    sizes = () if name == "MoE" else (torch.tensor(SIZES),)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    for function in (lambda: checkpoint(module, x, *sizes, use_reentrant=False), lambda: compiled(x, *sizes)):
        y = function()
        for ours, theirs in zip(
            [y, *torch.autograd.grad(y, [x, *own], dy[:, : y.shape[1]].bfloat16())], wanted, strict=True
        ):
            assert torch.equal(ours, theirs)
    if name == "MoE":
        module.form = "recompute"
        assert all(map(torch.equal, passed(module, x, dy, [x, *own]), wanted))
    file = io.BytesIO()
    torch.save(module.state_dict(), file)
    file.seek(0)
    with quantized_parameters("fp8-block"):
        twin = made(name)
    add_lora(twin, 8, alpha=16)
    twin.load_state_dict(torch.load(file, weights_only=True))
    assert torch.equal(called(twin, x), wanted[0])


@pytest.mark.parametrize("name", MODULES)
def test_codes_of_a_recipe_with_another_output_dtype(name: str) -> None:
    """fc1's result has x's dtype beside adapters, and its codes are the recipe's none the less."""
    with quantized_parameters(BlockScaling(output_dtype="float32")):
        module = made(name).requires_grad_(False)
    x = torch.randn(M, K).bfloat16()
    before = called(module, x)
    add_lora(module, rank=4)
    assert before.dtype is torch.float32
    assert torch.equal(called(module, x), before)

"""Operands that are quantized before a call: inputs, weights with a flag on the device, results in codes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from code_planes import planes
from torch import Tensor
from torch.utils import _pytree as pytree

import octavo_registry
from octavo import MXFP8, NVFP4, PRESETS, DelayedScaling, Recipe
from octavo_torch import (
    DelayedState,
    GroupedLinear,
    GroupedMLP,
    Sequential,
    grouped_linear,
    grouped_linear_quantized,
    grouped_mlp,
    quantize,
    quantize_input,
    quantize_weight,
)

SIZES = torch.tensor([20, 0, 40])
M, K, F, N, G = 70, 64, 48, 32, len(SIZES)
RECIPES: dict[str, Recipe] = {**PRESETS, "fp8-delayed": DelayedScaling(history=3)}


@pytest.fixture(autouse=True)
def on_the_reference() -> Iterator[None]:
    """Whatever else is installed: other backends have tests of their own."""
    with octavo_registry.prefer("torch-reference"):
        yield


def state_of(recipe: Recipe) -> DelayedState | None:
    return DelayedState.create(recipe, G) if recipe.stateful else None  # type: ignore[arg-type]


def operands(features: int = N) -> tuple[Tensor, Tensor, Tensor]:
    x, w = torch.randn(M, K).bfloat16().requires_grad_(), torch.randn(G, features, K).bfloat16().requires_grad_()
    return x, w, torch.randn(M, features).bfloat16()


def assert_equal(left: Any, right: Any) -> None:
    for ours, theirs in zip(left, right, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("name", RECIPES)
def test_an_input_quantized_once_for_two_layers(name: str, rng: np.random.Generator) -> None:
    """A gate and an up projection read one x: bits and gradients of each quantizing its own; amax is recorded once."""
    recipe = RECIPES[name]
    x, gate, dy = operands()
    up = torch.randn(G, N, K).bfloat16().requires_grad_()
    call: dict[str, Any] = {"recipe": recipe, "seed": 3}
    made = []
    for once in (False, True):
        states = [state_of(recipe) for _ in range(2)]
        rows: Any = quantize_input(x, gate, SIZES, recipe, seed=3, state=states[0]) if once else x
        ys = [
            grouped_linear(rows, w, None if once else SIZES, state=state, **call)
            for w, state in zip((gate, up), states, strict=True)
        ]
        made.append([*ys, *torch.autograd.grad(ys, (x, gate, up), (dy, dy))])
        if states[0] is not None and states[1] is not None:
            assert states[0].history[0, 0].any()
            assert states[1].history[0, 0].any() != once
    assert_equal(*made)


@pytest.mark.parametrize("name", ["mxfp8", "nvfp4", "fp8-block"])
def test_a_grouped_tensor_as_x(name: str, rng: np.random.Generator) -> None:
    """Codes alone serve forward and wgrad, through the function, the module and the MLP; x itself is never read."""
    recipe = RECIPES[name]
    x, w, dy = operands(2 * F)
    w2 = torch.randn(G, N, F).bfloat16()
    spec = recipe.quantizer("x")
    assert spec is not None
    codes = quantize(x.detach(), spec, SIZES, seed=3)
    y, z = (grouped_linear(rows, w, sizes, recipe=recipe, seed=3) for rows, sizes in ((codes, None), (x, SIZES)))
    assert_equal((y, *torch.autograd.grad(y, w, dy)), (z, *torch.autograd.grad(z, w, dy)))
    layer = GroupedLinear(G, K, N, recipe=recipe, dtype=torch.bfloat16, seed=3)
    model = Sequential(layer)
    assert torch.equal(model(codes, None), layer(x, SIZES))
    assert torch.equal(
        grouped_mlp(codes, w, w2, None, recipe=recipe, seed=3), grouped_mlp(x, w, w2, SIZES, recipe=recipe, seed=3)
    )


def test_a_result_in_codes(rng: np.random.Generator) -> None:
    """Two layers without high-precision rows between them, and the seed of the second quantizer is another one."""
    recipe = MXFP8()
    x, w, _ = operands()
    spec = recipe.quantizer("x")
    assert spec is not None
    codes = grouped_linear_quantized(x, w, SIZES, spec, recipe=recipe)
    expected = quantize(grouped_linear(x, w, SIZES, recipe=recipe).detach(), spec, SIZES)
    for ours, theirs in zip(pytree.tree_leaves(codes), pytree.tree_leaves(expected), strict=True):
        assert torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8))
    again = torch.randn(G, K, N).bfloat16()
    made = grouped_linear_quantized(codes, again, None, spec, recipe=recipe)
    assert made.shape == (M, K)
    stochastic = NVFP4().quantizer("dy")
    assert stochastic is not None
    first, second = (grouped_linear_quantized(x, w, SIZES, stochastic, recipe=recipe, seed=seed) for seed in (3, 4))
    assert not torch.equal(first.rowwise, second.rowwise)  # type: ignore[arg-type]


def test_inputs_that_do_not_fit_are_refused(rng: np.random.Generator) -> None:
    """Sentences for sizes, specs, directions, slots, and codes that are older than their rows."""
    x, w, _ = operands()
    recipe = MXFP8()
    spec = recipe.quantizer("x")
    assert spec is not None
    codes, handle = quantize(x.detach(), spec, SIZES), quantize_input(x, w, SIZES, recipe)
    narrow = type(spec)(**{**dict(spec), "orientation": "rowwise"})
    stacked = quantize(w.detach(), spec)
    wrong: list[tuple[Any, Any, dict[str, Any], str]] = [
        (codes, SIZES, {}, "group_sizes was given with an x that is quantized"),
        (codes, None, {"recipe": PRESETS["fp8-block"]}, "x was quantized by .* and the recipe's quantizer of x is"),
        (codes, None, {"recipe": None}, "recipe high_precision has a slot that reads it unquantized"),
        (codes, None, {"recipe": MXFP8(wgrad="high_precision")}, "has a slot that reads it unquantized"),
        (quantize(x.detach(), narrow, SIZES), None, {}, "this tensor holds rowwise data only"),
        (stacked, None, {}, "stacked matrices; give quantized rows"),
        (handle, None, {"recipe": PRESETS["fp8-block"]}, "x was quantized for recipe mxfp8"),
        (quantize(x.detach(), spec, [20, 0]), None, {}, "group_sizes has 2 sizes and weight 3 groups"),
    ]
    for rows, sizes, changed, message in wrong:
        with pytest.raises(ValueError, match=message):
            grouped_linear(rows, w, sizes, **{"recipe": recipe, **changed})
    with torch.no_grad():
        x.add_(1)
    with pytest.raises(ValueError, match="x has changed in place since quantize_input"):
        grouped_linear(handle, w, None, recipe=recipe)


@pytest.mark.parametrize("parted", [False, True], ids=["single", "per group"])
@pytest.mark.parametrize("name", RECIPES)
def test_weights_unless_nothing_has_changed(name: str, parted: bool, rng: np.random.Generator) -> None:
    """Codes are written again at their addresses, or stay where a flag in memory says so; the handle may be used either
    way, and delayed scaling's amax is recorded (faults.md 37)."""
    recipe = RECIPES[name]
    whole = torch.randn(G, N, K).bfloat16()
    w: Any = tuple(group.clone().requires_grad_() for group in whole) if parted else whole.requires_grad_()
    state, other = state_of(recipe), state_of(recipe)
    handle = quantize_weight(w, recipe, state=state)
    places, old = [plane.data_ptr() for plane in planes(handle)], [plane.clone() for plane in planes(handle)]
    flag = torch.zeros(1, dtype=torch.int32)
    x, _, _ = operands()
    for unchanged in (1, 0):
        with torch.no_grad():
            for leaf in w if parted else (w,):
                leaf.mul_(3)
        flag.fill_(unchanged)
        if state is not None:
            state.history.zero_()
        assert quantize_weight(w, recipe, state=state, out=handle, unchanged=flag) is handle
        fresh = quantize_weight(w, recipe, state=other)
        assert [plane.data_ptr() for plane in planes(handle)] == places
        assert_equal(planes(handle), old if unchanged else planes(fresh))
        y = grouped_linear(x, handle, SIZES, recipe=recipe, seed=1, state=state)
        assert bool(y.isfinite().all())
        if state is not None:
            assert bool(state.history[1, 0].all())
    assert quantize_weight(w, recipe, state=state, out=handle) is handle
    assert_equal(planes(handle), planes(fresh))


def test_modules_write_their_weights_again(rng: np.random.Generator) -> None:
    """GroupedLinear, GroupedMLP and Sequential take handle and flag; nothing is kept inside of them."""
    flag = torch.zeros(1, dtype=torch.int32)
    linear = GroupedLinear(G, K, N, recipe=MXFP8(), dtype=torch.bfloat16)
    mlp = GroupedMLP(G, N, F, K, recipe=MXFP8(), dtype=torch.bfloat16, interleave=4)
    model = Sequential(linear, mlp)
    x, _, _ = operands()
    handles = model.quantize_weights()
    before = model(x, SIZES, weights=handles)
    assert torch.equal(before, model(x, SIZES))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2)
    flag.fill_(1)
    assert torch.equal(model(x, SIZES, weights=model.quantize_weights(out=handles, unchanged=flag)), before)
    flag.zero_()
    after = model(x, SIZES, weights=model.quantize_weights(out=handles, unchanged=flag))
    assert torch.equal(after, model(x, SIZES))
    assert not torch.equal(after, before)


def test_weights_that_do_not_fit_are_refused(rng: np.random.Generator) -> None:
    """Sentences for handles of others, flags of other kinds, and weights whose gradient is wanted now."""
    x, w, _ = operands()
    recipe = MXFP8()
    handle = quantize_weight(w, recipe)
    flag = torch.zeros(1, dtype=torch.int32)
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"unchanged": flag}, "unchanged was given without out"),
        ({"out": handle, "unchanged": 1}, "unchanged is int; give an int32 tensor of one element"),
        ({"out": handle, "unchanged": flag.bool()}, r"unchanged is bool \[1\]"),
        ({"out": handle.codes}, "out is a GroupedTensor; give what quantize_weight returned"),
        ({"out": handle, "w": w.detach()}, "out was made of another weight"),
        ({"out": handle, "recipe": PRESETS["fp8-block"]}, "weight was quantized for recipe mxfp8"),
        ({"out": handle, "interleave": 4}, "out was made with interleave=None"),
        ({"interleave": 3}, "interleave is 3 and the weight has 16 gate rows; give a divisor of 16"),
    ]
    for changed, message in wrong:
        with pytest.raises(ValueError, match=message):
            quantize_weight(**{"w": w, "recipe": recipe, **changed})
    w.requires_grad_(False)
    with pytest.raises(ValueError, match="out holds both data and the call makes rowwise"):
        quantize_weight(w, recipe, out=handle)
    frozen = quantize_weight(w, recipe)
    with torch.no_grad():
        grouped_linear(x, frozen, SIZES, recipe=recipe)
    with pytest.raises(ValueError, match="weight required no gradient when it was quantized"):
        grouped_linear(x, frozen, SIZES, recipe=recipe)
    with pytest.raises(ValueError, match="out holds rowwise data and the call makes both"):
        quantize_weight(w.requires_grad_(), recipe, out=frozen)


@pytest.mark.parametrize("kind", ["linear", "mlp"])
def test_nothing_is_recorded_in_evaluation(kind: str, rng: np.random.Generator) -> None:
    """`eval()` leaves histories as they are, of operands that are quantized once, too: an evaluation's largest input
    was once the scale of training."""
    options = {"recipe": DelayedScaling(history=4), "backend": "torch-reference"}
    layer: Any = GroupedLinear(2, 32, 16, **options) if kind == "linear" else GroupedMLP(2, 32, 16, **options)
    x, sizes = torch.randn(8, 32), torch.tensor([3, 5])

    def quantize(x: Tensor) -> None:
        if kind == "mlp":
            codes = layer.quantize_weights()
            layer.quantize_weights(out=codes)
            return
        layer(layer.quantize_input(x, sizes), None, weight=layer.quantize_weight())

    layer(x, sizes)
    before = layer.amax_history.clone()
    layer.eval()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.mul_(100)
        quantize(100 * x)
    assert torch.equal(layer.amax_history, before)
    layer.train()
    quantize(100 * x)
    assert not torch.equal(layer.amax_history, before)


def test_codes_older_than_a_cast_are_refused() -> None:
    """As what they are: the sentence was about torch.autocast, which nobody had turned on."""
    layer = GroupedLinear(2, 32, 16, recipe="mxfp8", backend="torch-reference")
    codes = layer.quantize_weight()
    layer.to(torch.bfloat16)
    with pytest.raises(ValueError, match="quantized from values in float32 and has been cast to bfloat16 since"):
        layer(torch.randn(8, 32).bfloat16(), [3, 5], weight=codes)

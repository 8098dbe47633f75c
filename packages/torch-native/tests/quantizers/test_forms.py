"""The forms of a grouped layer on this backend's kernels, on the CPU and on Hopper: a parameter a group, weight
gradients that come later, buffers, operands that are quantized before. Each has the bits of the plain form.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from cuda_device import MARKS, no_sync
from torch import Tensor

import octavo_registry
from octavo import PRESETS, DelayedScaling, Recipe
from octavo_torch import (
    DelayedState,
    GroupedLinear,
    GroupedMLP,
    check_errors,
    grouped_linear,
    quantize,
    quantize_input,
    quantize_weight,
)
from octavo_torch.arrays.per_group import leaves_of
from octavo_torch.scaling.recipe_module import RecipeModule

SIZES, M, K, F, N = [33, 0, 70, 16], 150, 144, 64, 80
G = len(SIZES)
RECIPES: dict[str, Recipe] = {**PRESETS, "fp8-delayed": DelayedScaling(history=3)}
DEVICES = ["cpu", pytest.param("cuda", marks=MARKS)]
MODES = [None, "accumulate", "overwrite"]


@pytest.fixture(autouse=True)
def on_this_backend() -> Iterator[None]:
    """No other one, and sizes that fit set no flag."""
    with octavo_registry.prefer("torch-native"):
        yield
        check_errors()


def sizes_on(device: str) -> Tensor:
    return torch.tensor(SIZES, device=device)


def data(device: str) -> tuple[Tensor, Tensor]:
    """x and dy, NaN past the sum."""
    x, dy = torch.randn(M, K, device=device).bfloat16(), torch.randn(M, N, device=device).bfloat16()
    x[sum(SIZES) :] = dy[sum(SIZES) :] = torch.nan
    return x, dy


def make(kind: str, device: str, recipe: Recipe, **rest: Any) -> RecipeModule:
    given = {"bias": True, "recipe": recipe, "dtype": torch.bfloat16, "seed": 1, "device": device, **rest}
    return GroupedLinear(G, K, N, **given) if kind == "linear" else GroupedMLP(G, K, F, N, **given)


def weights(module: RecipeModule) -> list[Tensor]:
    names = [name for name in module._shapes if name.startswith("weight")]
    return [leaf for name in names for leaf in leaves_of(module.of_all_groups(name))]  # type: ignore[arg-type]


def gathered(module: RecipeModule) -> list[Tensor]:
    """Gradients and main_grad by parameter, all groups together, and buffers."""
    made = []
    for name in module._shapes:
        leaves = leaves_of(module.of_all_groups(name))  # type: ignore[arg-type]
        for what in ("grad", "main_grad"):
            values = [value for leaf in leaves if (value := getattr(leaf, what, None)) is not None]
            if values:
                made.append(values[0] if values[0].dim() == len(module._shapes[name]) else torch.stack(values))
    return [*made, *module.buffers()]


def assert_equal(left: list[Tensor], right: list[Tensor]) -> None:
    assert len(left) == len(right)
    for ours, theirs in zip(left, right, strict=True):
        assert ours.shape == theirs.shape
        assert torch.equal(ours.reshape(-1).view(torch.uint8), theirs.reshape(-1).view(torch.uint8))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("main_grad", MODES)
@pytest.mark.parametrize("kind", ["linear", "mlp"])
def test_weight_gradients_later(kind: str, main_grad: Any, device: str, rng: np.random.Generator) -> None:
    """Two microbatches, every recipe, one parameter and one a group, on a stream of its own while others are busy and
    memory is used again: the bits of backward's, and nothing waits (faults.md 34)."""
    for number, recipe in enumerate(RECIPES.values()):
        parted = bool(number % 2)
        at_once = make(kind, device, recipe, main_grad=main_grad)
        later = make(kind, device, recipe, main_grad=main_grad, delay_wgrad=True, per_group_parameters=parted)
        later.load_state_dict(at_once.state_dict())
        for module in (at_once, later):
            for group, leaf in enumerate(weights(module)):
                if main_grad is not None:
                    leaf.main_grad = torch.ones(leaf.shape, device=device)  # type: ignore[attr-defined]
                elif group == 0:
                    leaf.grad = torch.zeros_like(leaf)
        batches, sizes = [data(device) for _ in range(2)], sizes_on(device)
        for x, dy in batches:
            at_once(x, sizes).backward(dy)
        if device == "cpu":
            for x, dy in batches:
                later(x, sizes).backward(dy)
            later.backward_dw()
        else:
            on_a_side_stream(later, batches, sizes)
        assert_equal(gathered(later), gathered(at_once))


def on_a_side_stream(later: RecipeModule, batches: list[tuple[Tensor, Tensor]], sizes: Tensor) -> None:
    side = torch.cuda.Stream()
    with no_sync():
        torch.cuda._sleep(2_000_000)
        for x, dy in batches:
            later(x, sizes).backward(dy)
        with torch.cuda.stream(side):
            later.backward_dw(1)
            torch.cuda._sleep(2_000_000)
            later.backward_dw(1)
        # whatever was freed on the first stream is written over
        for _ in range(4):
            torch.full((1 << 20,), torch.nan, device="cuda")
        torch.cuda.current_stream().wait_stream(side)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", ["linear", "mlp"])
def test_a_parameter_a_group(kind: str, device: str, rng: np.random.Generator) -> None:
    """Every recipe; main_grad in one piece, reversed as Megatron lays it, or at odd addresses (faults.md 58)."""
    for number, recipe in enumerate(RECIPES.values()):
        for place in ("none", ("piece", "reversed", "odd")[number % 3]):
            mode = None if place == "none" else ("accumulate", "overwrite")[number % 2]
            single, parted = (make(kind, device, recipe, main_grad=mode, per_group_parameters=p) for p in (False, True))
            parted.load_state_dict(single.state_dict())
            for name, shape in single._shapes.items() if mode else ():
                start = torch.randn(shape, device=device)
                leaf, leaves = getattr(single, name), leaves_of(parted.of_all_groups(name))  # type: ignore[arg-type]
                leaf.main_grad = start.clone()
                for part, buffer in zip(leaves, in_place(start, place), strict=True):
                    part.main_grad = buffer  # type: ignore[attr-defined]
            x, dy = data(device)
            made = []
            for module in (single, parted):
                leaf = x.clone().requires_grad_()
                y = module(leaf, sizes_on(device))
                y.backward(dy)
                made.append([y.detach(), leaf.grad, *gathered(module)])
            assert_equal(*made)


def in_place(start: Tensor, place: str) -> list[Tensor]:
    """The parts of `start` in memory of one kind."""
    if place == "piece":
        return list(start.clone())
    if place == "reversed":
        return list(reversed(list(start.flip(0).contiguous())))
    memory = torch.empty(start.numel() + len(start), device=start.device)
    pieces = [memory[g * (start[0].numel() + 1) + 1 :][: start[0].numel()].view(start[0].shape) for g in range(G)]
    for piece, value in zip(pieces, start, strict=True):
        piece.copy_(value)
    return pieces


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", RECIPES)
def test_weights_unless_nothing_has_changed(name: str, device: str, rng: np.random.Generator) -> None:
    """The kernels' own flag on the device, with nothing read back; codes at their addresses (faults.md 37)."""
    recipe = RECIPES[name]
    w = torch.randn(G, N, K, device=device).bfloat16().requires_grad_()
    states = [DelayedState.create(recipe, G, device) if recipe.stateful else None for _ in range(2)]  # type: ignore[arg-type]
    handle = quantize_weight(w, recipe, state=states[0])
    x, dy = data(device)
    flag = torch.zeros(1, dtype=torch.int32, device=device)

    def step(weight: Any, state: DelayedState | None) -> list[Tensor]:
        leaf = x.clone().requires_grad_()
        y = grouped_linear(leaf, weight, sizes_on(device), recipe=recipe, seed=1, state=state)
        return [y, *torch.autograd.grad(y, (leaf, w), dy)]

    before = step(handle, states[0])
    for unchanged in (1, 0):
        flag.fill_(unchanged)
        if not unchanged:
            with torch.no_grad():
                w.neg_()
        assert quantize_weight(w, recipe, state=states[0], out=handle, unchanged=flag) is handle
        made = step(handle, states[0])
        assert_equal(made, before if unchanged else step(w, states[1]))
        if states[0] is not None:
            assert bool(states[0].history[1, 0].all())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", RECIPES)
def test_inputs_that_are_quantized_before(name: str, device: str, rng: np.random.Generator) -> None:
    """In the kernels' layouts by quantize_input, in the plain one as a GroupedTensor: the bits of the tensor."""
    recipe = RECIPES[name]
    x, dy = data(device)
    leaf = x.requires_grad_()
    w = torch.randn(G, N, K, device=device).bfloat16().requires_grad_()
    sizes = sizes_on(device)
    states = [DelayedState.create(recipe, G, device) if recipe.stateful else None for _ in range(2)]  # type: ignore[arg-type]
    y = grouped_linear(leaf, w, sizes, recipe=recipe, seed=1, state=states[0])
    expected = [y, *torch.autograd.grad(y, (leaf, w), dy)]
    rows = quantize_input(leaf, w, sizes, recipe, seed=1, state=states[1])
    y = grouped_linear(rows, w, None, recipe=recipe, seed=1, state=states[1])
    assert_equal([y, *torch.autograd.grad(y, (leaf, w), dy)], expected)
    spec = recipe.quantizer("x")
    if spec is None or recipe.stateful or not recipe.quantizes("wgrad"):
        return
    codes = quantize(x.detach(), spec, sizes, seed=1)
    y = grouped_linear(codes, w, None, recipe=recipe, seed=1)
    assert_equal([y, *torch.autograd.grad(y, w, dy)], [expected[0], expected[2]])


def between_columns(rows: int, columns: int, device: str) -> Tensor:
    return torch.full((rows + 2, columns + 24), 5.0, device=device).bfloat16()[1 : rows + 1, 8 : columns + 8]


def at_odd_addresses(rows: int, columns: int, device: str) -> Tensor:
    return torch.full((rows, columns + 3), 5.0, device=device).bfloat16()[:, 1 : columns + 1]


def transposed(rows: int, columns: int, device: str) -> Tensor:
    return torch.full((columns, rows), 5.0, device=device).bfloat16().T


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", ["linear", "mlp"])
@pytest.mark.parametrize("place", [between_columns, at_odd_addresses, transposed])
def test_strided_buffers(
    place: Callable[[int, int, str], Tensor], kind: str, device: str, rng: np.random.Generator
) -> None:
    """out= and grad_input= where they lie, with the bits of a call without, and nothing beside them (faults.md 58)."""
    for recipe in (PRESETS["bf16"], PRESETS["mxfp8"], PRESETS["fp8-block"]):
        module = make(kind, device, recipe)
        x, dy = data(device)
        leaf = x.requires_grad_()
        y = module(leaf, sizes_on(device))
        expected = [y.detach(), *torch.autograd.grad(y, leaf, dy)]
        out, grad_input = place(M, N, device), place(M, K, device)
        y = module(leaf, sizes_on(device), out=out, grad_input=grad_input)
        torch.autograd.grad(y, leaf, dy)
        assert_equal([out.contiguous(), grad_input.contiguous()], expected)
        for buffer in (out, grad_input):
            buffer.fill_(5.0)
            memory = torch.empty(0, dtype=buffer.dtype, device=device).set_(buffer.untyped_storage())
            assert bool((memory == 5.0).all())


@pytest.mark.parametrize("device", DEVICES)
def test_interleaved_gate_and_up(device: str, rng: np.random.Generator) -> None:
    """Every other row: what the layer with the gate half first makes of the same rows."""
    for recipe in RECIPES.values():
        halves = GroupedMLP(G, K, F, N, recipe=recipe, dtype=torch.bfloat16, device=device, seed=1)
        turns = GroupedMLP(G, K, F, N, recipe=recipe, dtype=torch.bfloat16, device=device, seed=1, interleave=1)
        turns.load_state_dict(halves.state_dict())
        with torch.no_grad():
            turns.weight1.copy_(torch.stack(halves.weight1.chunk(2, 1), 2).flatten(1, 2))
        x, dy = data(device)
        made = []
        for module in (halves, turns):
            y = module(x, sizes_on(device))
            y.backward(dy)
            grad = module.weight1.grad
            assert grad is not None
            if module is turns:
                grad = torch.cat([grad[:, ::2], grad[:, 1::2]], 1)
            made.append([y.detach(), grad, module.weight2.grad])
        assert_equal(*made)  # type: ignore[arg-type]

"""A grouped MLP's calls after the first of their kind are written down and run again: the same bits, and memory."""

from __future__ import annotations

from itertools import count
from typing import Any

import numpy as np
import pytest
import torch
from cuda_device import MARKS
from mlp_layers import states_of
from torch import Tensor

from octavo import PRESETS, DelayedScaling, Recipe
from octavo_torch import grouped_mlp, quantize_weight
from octavo_torch.mlp import autograd
from octavo_torch.recording import recorded_pass

G, K, F, N, M = 5, 144, 112, 80, 190
NATIVE = "torch-native"
RECIPES: dict[str, Recipe] = {name: recipe for name, recipe in PRESETS.items() if not recipe.stochastic} | {
    "fp8-delayed": DelayedScaling(history=4)
}
DEVICES = ["cpu", pytest.param("cuda", marks=MARKS)]

_kinds = count(1)


def of_a_new_kind() -> dict[str, int]:
    """An option that no call had before, and that changes no bit where nothing is rounded stochastically."""
    return {"group_offset": next(_kinds)}


@pytest.fixture
def composed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The passes that Python composes, in their order."""
    seen: list[str] = []
    for name in ("_composed_forward", "_composed_backward"):
        real = getattr(autograd, name)

        def noted(*given: Any, real: Any = real, name: str = name, **how: Any) -> Any:
            seen.append(name.removeprefix("_composed_"))
            return real(*given, **how)

        monkeypatch.setattr(autograd, name, noted)
    return seen


def draw(rng: np.random.Generator, device: str, rows: int = M) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """Leaves by their names in grouped_mlp; sizes, with an empty group, that leave rows over; and dy."""
    made = {
        "x": torch.randn(rows, K).bfloat16(),
        "w1": (torch.randn(G, 2 * F, K) / 8).bfloat16(),
        "w2": (torch.randn(G, N, F) / 8).bfloat16(),
        "probs": torch.rand(rows),
        "bias1": torch.randn(G, 2 * F).bfloat16(),
    }
    sizes = rng.multinomial(rows - int(rng.integers(0, 20)), [0.3, 0.0, 0.3, 0.2, 0.2])
    leaves = {name: value.to(device).requires_grad_(name != "bias1") for name, value in made.items()}
    return leaves, torch.from_numpy(sizes).to(device), torch.randn(rows, N, device=device).bfloat16()


def step(given: dict[str, Tensor], sizes: Tensor, dy: Tensor, **call: Any) -> list[Tensor]:
    """y and the gradients of what takes one."""
    y = grouped_mlp(group_sizes=sizes, backend=NATIVE, **given, **call)
    leaves = [value for value in given.values() if isinstance(value, Tensor) and value.requires_grad]
    return [y, *torch.autograd.grad(y, leaves, dy)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", RECIPES)
def test_later_calls_have_the_bits_of_the_first(
    name: str, device: str, rng: np.random.Generator, composed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fresh operands and sizes each time, which the caller overwrites between the passes: beside calls each the first
    of its kind, and delayed scaling's states beside those of such calls."""
    monkeypatch.setattr(recorded_pass, "SMALL", int(rng.choice([1, 1 << 14, 1 << 20])))
    recipe = RECIPES[name]
    ours, theirs = states_of(recipe, G, device), states_of(recipe, G, device)
    kind = of_a_new_kind()
    for number in range(5):
        given, sizes, dy = draw(rng, device)
        expected = step(given, sizes, dy, recipe=recipe, state=theirs, **of_a_new_kind())
        composed.clear()
        mine = sizes.clone()
        y = grouped_mlp(group_sizes=mine, backend=NATIVE, recipe=recipe, state=ours, **given, **kind)
        if number > 1:
            mine.zero_()  # a composed backward of a layer on a CPU reads them, and refuses
        found = [y, *torch.autograd.grad(y, [value for value in given.values() if value.requires_grad], dy)]
        for place, (left, right) in enumerate(zip(found, expected, strict=True)):
            assert torch.equal(left, right), (number, place)
        assert (composed == []) == (number > 1)
        for mine_state, other in zip(ours or (), theirs or (), strict=True):
            assert torch.equal(mine_state.history, other.history)
            mine_state.update()
            other.update()


@pytest.mark.parametrize("device", DEVICES)
def test_what_may_differ_between_calls(device: str, rng: np.random.Generator) -> None:
    """Sizes on the host and as a list, sizes that do not fit, codes made before, a second backward, no gradients, a
    buffer for the result: each call has the bits of the first of its kind, or its error."""
    recipe = PRESETS["fp8-block"]
    kind = of_a_new_kind()
    for _ in range(4):
        given, sizes, dy = draw(rng, device)
        expected = step(given, sizes, dy, recipe=recipe, **of_a_new_kind())
        leaves = [value for value in given.values() if value.requires_grad]
        coded = given | {name: quantize_weight(given[name], recipe, backend=NATIVE) for name in ("w1", "w2")}
        for operands in (given, coded):
            for these in (sizes, sizes.int(), sizes.cpu(), sizes.tolist()):
                y = grouped_mlp(group_sizes=these, backend=NATIVE, recipe=recipe, **operands, **kind)
                for retain in (True, False):
                    found = [y, *torch.autograd.grad(y, leaves, dy, retain_graph=retain)]
                    assert all(map(torch.equal, found, expected))
        with torch.no_grad():
            y = grouped_mlp(group_sizes=sizes, backend=NATIVE, recipe=recipe, **given, **kind)
            assert torch.equal(y, expected[0])
            out = torch.empty_like(y)
            grouped_mlp(group_sizes=sizes, backend=NATIVE, recipe=recipe, out=out, **given, **kind)
            assert torch.equal(out, expected[0])
        with pytest.raises(ValueError, match="group_sizes"):
            grouped_mlp(group_sizes=[M, 1, 0, 0, 0], backend=NATIVE, recipe=recipe, **given, **kind)


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=MARKS)])
@pytest.mark.parametrize("name", ["bf16", "fp8-block", "fp8-delayed", "mxfp8"])
def test_the_peak_is_not_higher(name: str, device: str, rng: np.random.Generator) -> None:
    """Memory of a call that is composed, written down and run again, with arrays of many megabytes."""
    recipe, rows, experts, k, f = RECIPES[name], 16384, 16, 1024, 512
    given = {
        "x": torch.randn(rows, k, device=device).bfloat16().requires_grad_(),
        "w1": (torch.randn(experts, 2 * f, k, device=device) / 8).bfloat16().requires_grad_(),
        "w2": (torch.randn(experts, k, f, device=device) / 8).bfloat16().requires_grad_(),
    }
    sizes = torch.from_numpy(rng.multinomial(rows, [1 / experts] * experts)).to(device)
    dy, kind, peaks = torch.randn(rows, k, device=device).bfloat16(), of_a_new_kind(), []
    state = states_of(recipe, experts, device)
    for _ in range(4):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        found = step(given, sizes, dy, recipe=recipe, state=state, **kind)
        torch.cuda.synchronize()
        peaks.append(torch.cuda.max_memory_allocated() - before)
        del found
    first, *later = peaks
    assert max(later) <= first + (4 << 20), peaks


def test_a_state_that_was_replaced_is_refused(rng: np.random.Generator) -> None:
    """Kernels get addresses alone: a backward that is composed, written down or run again does not take a state for
    what it was in forward."""
    recipe, kind = RECIPES["fp8-delayed"], of_a_new_kind()
    for _ in range(4):
        given, sizes, dy = draw(rng, "cpu")
        state = states_of(recipe, G)
        assert state is not None
        y = grouped_mlp(group_sizes=sizes, backend=NATIVE, recipe=recipe, state=state, **given, **kind)
        state[0].scale = state[0].scale.double()
        with pytest.raises(ValueError, match="in float32, whatever a model is cast to"):
            torch.autograd.grad(y, given["x"], dy)

"""What a module says of its recipe: one that was not given, one that is assigned, amax that nobody uses."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import octavo_torch
from octavo import MXFP8, NVFP4, DelayedScaling
from octavo_torch import Activation, GroupedLinear, GroupedMLP, Sequential, update_scales
from octavo_torch.scaling.unused_amax import STEPS

G, K = 2, 16
SIZES = [3, 4]
DELAYED = DelayedScaling(history=4)

MODULES: dict[str, Callable[[Any], nn.Module]] = {
    "GroupedLinear": lambda recipe: GroupedLinear(G, K, K, recipe=recipe),
    "per group": lambda recipe: GroupedLinear(G, K, K, recipe=recipe, per_group_parameters=True),
    "GroupedMLP": lambda recipe: GroupedMLP(G, K, K, recipe=recipe),
    "Sequential": lambda recipe: Sequential(
        GroupedLinear(G, K, 2 * K, recipe=recipe), Activation(), GroupedLinear(G, K, K, recipe=recipe)
    ),
}


def said(run: Callable[[], object]) -> list[str]:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        run()
    return [str(each.message) for each in seen]


def train(model: nn.Module, steps: int, microbatches: int = 1, update: bool = False) -> None:
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    for _ in range(steps):
        for _ in range(microbatches):
            model(torch.randn(8, K), SIZES).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if update:
            update_scales(model)


@pytest.mark.parametrize("kind", [GroupedLinear, GroupedMLP])
def test_a_recipe_that_is_not_given(kind: type[Any]) -> None:
    """A library of low precision computes nothing in high precision unless that is said; the warning is at the call."""
    with pytest.warns(UserWarning, match=f"{kind.__name__} was created without a recipe.*recipe=None") as seen:
        module = kind(G, K, K)
    assert seen[0].filename == __file__
    assert module.recipe.kind == "high_precision"
    assert not said(lambda: kind(G, K, K, recipe=None))
    assert not said(lambda: kind(G, K, K, recipe="bf16"))


@pytest.mark.parametrize("name", MODULES)
def test_amax_that_nobody_uses(name: str, rng: np.random.Generator) -> None:
    """Without update_scales the first scales stay for good, and values saturate: said once for each layer."""
    model = MODULES[name](DELAYED)
    assert not said(lambda: train(model, STEPS))  # the first forward sees no change
    layers = 2 if name == "Sequential" else 1
    told = said(lambda: train(model, 3 * STEPS))
    assert len(told) == layers
    assert all("call octavo_torch.update_scales(model) after each optimizer step" in text for text in told)


@pytest.mark.parametrize("name", MODULES)
def test_amax_that_is_used(name: str, rng: np.random.Generator) -> None:
    """Any number of microbatches, copies, evaluation and the recomputation of activations are nothing to say."""
    model = MODULES[name](DELAYED)
    assert not said(lambda: train(model, 2 * STEPS, microbatches=2, update=True))
    assert not said(lambda: train(copy.deepcopy(pickle.loads(pickle.dumps(model))), STEPS))
    model.eval()
    assert not said(lambda: train(model, 2 * STEPS))


def test_states_that_are_updated_by_hand(rng: np.random.Generator) -> None:
    """`DelayedState.update` counts, whoever calls it: its tensors are the module's buffers."""
    layer = GroupedLinear(G, K, K, recipe=DELAYED)

    def steps() -> None:
        for _ in range(2 * STEPS):
            train(layer, 1)
            assert layer.delayed_state is not None
            layer.delayed_state.update()

    assert not said(steps)


def test_in_inference_mode(rng: np.random.Generator) -> None:
    """Tensors made there count no versions: calls run, and nothing is said of scales that nobody updates."""

    def calls() -> None:
        with torch.inference_mode():
            layer = GroupedLinear(G, K, K, recipe=DELAYED)
            for _ in range(2 * STEPS):
                layer(torch.randn(8, K), SIZES)

    assert not said(calls)


def test_a_recipe_is_not_assigned() -> None:
    """Its buffers would be missing; `convert` makes them. The same recipe may be assigned."""
    layer = GroupedLinear(G, K, K, recipe="mxfp8")
    layer.recipe = MXFP8()
    with pytest.raises(AttributeError, match=r"octavo_torch.convert\(module, recipe\) gives the module another one"):
        layer.recipe = NVFP4()
    octavo_torch.convert(layer, NVFP4())
    assert (layer.recipe, *layer._buffers) == (NVFP4(), "seed_base", "seed_counter")


@pytest.mark.parametrize(("saved", "here"), [("mxfp8", "fp8-delayed"), ("fp8-delayed", "nvfp4"), ("nvfp4", "mxfp8")])
@pytest.mark.parametrize("name", ["GroupedLinear", "GroupedMLP"])
def test_a_state_of_another_recipe(name: str, saved: str, here: str) -> None:
    """Missing and unexpected keys of a recipe's state: the error names convert, and convert is the way."""
    source, target = (nn.ModuleDict({"experts": MODULES[name](recipe)}) for recipe in (saved, here))
    with pytest.raises(
        RuntimeError, match=r"the checkpoint of experts has .*create the module with the recipe"
    ) as caught:
        target.load_state_dict(source.state_dict())
    assert str(caught.value).count("octavo_torch.convert(module, recipe)") == 1
    missing, unexpected = target.load_state_dict(source.state_dict(), strict=False)
    assert {*missing} == target.state_dict().keys() - source.state_dict().keys()
    assert {*unexpected} == source.state_dict().keys() - target.state_dict().keys()
    again = nn.ModuleDict({"experts": MODULES[name](saved)})
    again.load_state_dict(source.state_dict())
    octavo_torch.convert(again, here)
    target.load_state_dict(again.state_dict())


def test_explain(rng: np.random.Generator) -> None:
    """The plans of the very layer that runs, with a gradient and without."""
    layer = GroupedLinear(G, K, K, recipe="mxfp8", backend="torch-reference")
    x = torch.randn(8, K)
    plan = layer.explain(x, SIZES)
    assert "quantize x" in str(plan)
    layer(x, SIZES)
    assert plan is next(iter(layer._layers.values())).plan
    with pytest.raises(ValueError, match="x has 8 features"):
        layer.explain(x[:, :8], SIZES)

"""A plugin of API level 4 works under level 5: the template as it was, with the paths and keywords of its time."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import pytest
import torch
from level4_acme import plugin
from workspace import ROOT

import octavo_registry
import octavo_torch
from octavo import BlockScaling, CurrentScaling, Recipe, RowScaling
from octavo_registry.contract import BoundFprop, BoundQuantize

SIZES = torch.tensor([40, 0, 17, 43])
LEVEL_4: dict[str, str] = {
    "octavo_registry.cards": (
        "ALL_ACTIVATIONS ALL_DTYPES ALL_NORMS GATED MOVES QUANTIZERS Accumulation Activation Arch BackendCard "
        "Capability Name Norm Op QuantizerCard Weight"
    ),
    "octavo_registry.hookspecs": "API_LEVEL PROJECT HookSpecs hookimpl hookspec",
    "octavo_registry.request": "Backend Bound Decision Plan Refused Request Verdict",
    "octavo_registry.kernels": "KernelChoice KernelModel",
    "octavo_registry.frameworks": "PLANES Device Framework LayerResult Sharding",
    "octavo_registry.weights": "WEIGHT_SHAPES as_it_lies readers",
    "octavo_registry": "Backend BackendCard Bound Capability KernelChoice Plan QuantizerCard Refused Request hookimpl",
}


@pytest.fixture
def level4() -> Iterator[str]:
    octavo_registry.register(plugin, plugin.NAME)
    yield plugin.NAME
    octavo_registry.unregister(plugin.NAME)


def layer(recipe: Recipe, backend: str) -> tuple[torch.Tensor, ...]:
    """y and the gradients of small integers, whose products and sums no order of additions changes."""
    x = torch.randint(-2, 3, (100, 256)).float().requires_grad_()
    w = torch.randint(-2, 3, (4, 128, 256)).float().requires_grad_()
    y = octavo_torch.grouped_linear(x, w, SIZES, recipe=recipe, backend=backend)
    return (y.detach(), *torch.autograd.grad(y.sum(), (x, w)))


@pytest.mark.parametrize("recipe", [BlockScaling(), RowScaling(), CurrentScaling()], ids=lambda recipe: recipe.kind)
def test_a_layer_runs_as_it_does_in_the_template(level4: str, recipe: Recipe) -> None:
    """Forward and backward, bit for bit those of the same functions behind answers of level 5."""
    torch.manual_seed(3)
    old = layer(recipe, level4)
    torch.manual_seed(3)
    for ours, theirs in zip(layer(recipe, "acme"), old, strict=True):
        assert torch.equal(ours, theirs)


def test_its_answers_become_those_of_the_contract(level4: str) -> None:
    """Optional parts, which were keywords of Bound or methods of its function, are fields of the answer."""
    where: dict[str, Any] = {"framework": "torch", "device": "cpu", "in_dtype": "float32", "out_dtype": "float32"}
    recipe = BlockScaling()
    spec = recipe.quantizer("x")
    assert spec is not None
    request = octavo_registry.QuantizeRequest(op="quantize", quantizer=spec, sizes="host", **where)
    quantize = octavo_registry.plan(request, backend=level4)
    assert isinstance(quantize.bound, BoundQuantize)
    codes, amax = quantize.bound.with_amax(torch.ones(2, 128))
    assert quantize.bound.from_plain(codes) is quantize.bound.to_plain(codes) is codes
    assert amax.tolist() == [1.0]
    assert quantize.bound.into is None
    gemm = octavo_registry.GemmRequest(op="fprop", recipe=recipe.for_gemm("fprop"), sizes="host", **where)
    fprop = octavo_registry.plan(gemm, backend=level4)
    assert isinstance(fprop.bound, BoundFprop)
    assert fprop.note == "dequantized tiles, fp32 products"
    assert octavo_registry.kernel_choices(gemm, rows=8, backend=level4) == (level4, None)


@pytest.mark.parametrize("module", LEVEL_4)
def test_its_paths_are_there(module: str) -> None:
    """What a plugin of level 4 could import is found where it was."""
    imported = importlib.import_module(module)
    assert [name for name in LEVEL_4[module].split() if not hasattr(imported, name)] == []


def test_a_plugin_of_level_3_is_refused_with_both_numbers() -> None:
    """Two levels are served; the sentence says what to upgrade."""

    class Older:
        def octavo_backends(self) -> Any:
            return [plugin.CARD.model_copy(update={"name": "older", "api_level": 3})]

        def octavo_load(self, name: str) -> Any:
            raise AssertionError

    octavo_registry.register(Older(), "older")
    try:
        (record,) = [record for record in octavo_registry.backends() if record.name == "older"]
        assert record.verdict == "refused"
        assert record.reason.startswith("was written for API level 3, this octavo-registry honours 4 and 5; upgrade ")
    finally:
        octavo_registry.unregister("older")


def test_level_4_promised_no_more() -> None:
    """The keywords of level 4's Bound and the fields of its Request are in its golden file, and still taken."""
    golden = json.loads((ROOT / "registry" / "api-levels" / "4.json").read_text())
    from octavo_registry.level4.bound import Bound
    from octavo_registry.level4.request import FlatRequest

    assert set(golden["bound"]) == {field.name for field in fields(Bound)}
    assert set(golden["request"]) == {field.name for field in fields(FlatRequest)}

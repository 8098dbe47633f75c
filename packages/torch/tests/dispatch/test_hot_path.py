"""A forward asks nobody: no model is built or hashed, no plugin, environment or signature is looked at."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
import torch

import octavo_registry
from octavo import MXFP8, NVFP4, BlockScaling, HighPrecision, Recipe
from octavo_torch import GroupedLinear, grouped_linear
from octavo_torch.linear.grouped import _layers as functional_layers
from octavo_torch.plugin import CARD
from octavo_torch.reference.backend import ReferenceBackend

SIZES = torch.tensor([3, 5])
FORBIDDEN = ("pydantic", "pydantic_core", "pluggy", "inspect", "os", "posixpath", "importlib", "importlib.metadata")


def frames_of(call: Callable[[], Any]) -> Counter[str]:
    """Modules of the Python frames that `call` enters."""
    seen: Counter[str] = Counter()

    def profile(frame: FrameType, event: str, _: Any) -> None:
        if event == "call":
            seen[frame.f_globals.get("__name__", "")] += 1

    sys.setprofile(profile)
    try:
        call()
    finally:
        sys.setprofile(None)
    return seen


@pytest.mark.parametrize("recipe", [HighPrecision(), BlockScaling(), MXFP8(), NVFP4()], ids=lambda r: r.kind)
@pytest.mark.parametrize("form", ["module", "function", "function, no gradient"])
def test_thousand_forwards_enter_no_foreign_frame(recipe: Recipe, form: str) -> None:
    """sys.setprofile over 1 000 forwards, fewer of a slow recipe, after the first (architecture.md, "The hot path")."""
    layer = GroupedLinear(2, 16, 8, recipe=recipe)
    x, w = torch.randn(8, 16), torch.randn(2, 8, 16, requires_grad=form != "function, no gradient")
    call: Callable[[], Any] = (
        (lambda: layer(x, SIZES)) if form == "module" else (lambda: grouped_linear(x, w, SIZES, recipe=recipe, seed=1))
    )
    call()
    forwards = 1000 if recipe.kind == "high_precision" else 20

    def many() -> None:
        for _ in range(forwards):
            call()

    seen = frames_of(many)
    foreign = {name: count for name, count in seen.items() if name.split(".")[0] in FORBIDDEN}
    assert not foreign
    assert seen["octavo_torch.linear.grouped"] >= forwards


def test_a_change_of_the_registry_is_seen() -> None:
    """A held layer is dropped when a preference or a plugin makes it stale."""
    layer = GroupedLinear(2, 16, 8)
    x = torch.randn(8, 16)
    layer(x, SIZES)
    with octavo_registry.prefer("torch-reference"):
        layer(x, SIZES)
    resolved = next(iter(layer._layers.values()))
    layer(x, SIZES)
    assert next(iter(layer._layers.values())) is not resolved
    with pytest.raises(octavo_registry.UnknownBackendError), octavo_registry.prefer("absent"):
        layer(x, SIZES)


class Second:
    """The reference under another name, last in line."""

    def octavo_backends(self) -> list[octavo_registry.BackendCard]:
        return [CARD.model_copy(update={"name": "second", "priority": -1000})]

    def octavo_load(self, name: str) -> ReferenceBackend:
        return ReferenceBackend()


def test_a_call_runs_on_the_backend_that_it_names() -> None:
    """Calls with one recipe, one shape and different backends: each has a layer of its own, in any order."""
    octavo_registry.register(Second(), "second")
    try:
        recipe, x, w = MXFP8(), torch.randn(8, 16), torch.randn(2, 8, 16)
        for backend in ("torch-reference", "second", "second", ["second", "torch-reference"], "torch-reference"):
            grouped_linear(x, w, SIZES, recipe=recipe, backend=backend)
            (layer,) = [layer for key, layer in functional_layers.items() if key[0] == id(recipe)]
            assert layer.plan.fprop.backend == (backend if isinstance(backend, str) else backend[0])
    finally:
        octavo_registry.unregister("second")


def test_shapes_dtypes_and_gradients_find_their_own_layer() -> None:
    """One recipe object serves many shapes; what is held for one is not used for another."""
    recipe = MXFP8()
    for k, n, dtype, grad in (
        (16, 8, torch.float32, False),
        (32, 8, torch.bfloat16, True),
        (16, 8, torch.float32, True),
    ):
        x, w = torch.randn(8, k, dtype=dtype), torch.randn(2, n, k, dtype=dtype, requires_grad=grad)
        for _ in range(2):
            y = grouped_linear(x, w, SIZES, recipe=recipe)
            assert (y.dtype, y.shape, y.requires_grad) == (dtype, (8, n), grad)

"""The names that octavo_torch.adapters.transformers registers functions under."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import octavo
from octavo_torch.adapters.transformers import register


class Interface(dict[str, Any]):
    """transformers' registry of experts functions, as far as `register` uses it."""

    register = dict.__setitem__


def test_another_recipe_never_takes_the_place_of_a_registered_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models look their function up by name in every call: two recipes of one kind, or two ways to run one, have two
    names; the same again has the name that it has. A name that is given is replaced, as its owner wants."""
    functions = Interface()
    module = SimpleNamespace(ALL_EXPERTS_FUNCTIONS=functions)
    for name in ("transformers", "transformers.integrations"):
        monkeypatch.setitem(sys.modules, name, SimpleNamespace())
    monkeypatch.setitem(sys.modules, "transformers.integrations.moe", module)
    other = octavo.MXFP8(wgrad="high_precision")
    seed = torch.tensor(3)
    ways: list[tuple[octavo.Recipe | str, dict[str, Any]]] = [
        ("mxfp8", {}), (other, {}), ("mxfp8", {"form": "lean"}), ("mxfp8", {"backend": "torch-reference"}),
        ("mxfp8", {"weight_codes": "remake"}), ("mxfp8", {"seed": 3}), ("mxfp8", {"seed": seed}),
    ]  # fmt: skip
    names = [register(recipe, **how) for recipe, how in ways]
    assert names == ["octavo-mxfp8", *(f"octavo-mxfp8-{number}" for number in range(2, len(ways) + 1))]
    assert functions[names[1]].product.recipe == other
    assert [register(recipe, **how) for recipe, how in ways] == names
    assert len(functions) == len(ways)
    assert register(other, name=names[0]) == names[0]
    assert functions[names[0]].product.recipe == other

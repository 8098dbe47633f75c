"""The recipes of a module's grouped layers beside its tensors: as JSON in a file, as fingerprints in a state dict."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

import octavo
from octavo import OctavoError, Recipe
from octavo_torch.arrays.checks import check_module, told
from octavo_torch.scaling.recipe_module import RecipeModule

_SUFFIX = "recipe_fingerprint"


def recipe_layers(module: nn.Module) -> dict[str, RecipeModule]:
    """The grouped layers of `module` by name, "" for the module itself."""
    return {name: layer for name, layer in module.named_modules() if isinstance(layer, RecipeModule)}


def recipe_state(module: nn.Module) -> dict[str, Tensor]:
    """The fingerprint of each grouped layer's recipe as uint8 [8], to be saved in a state dict beside the module's.

    Made for torch.distributed.checkpoint, whose state dicts hold tensors alone: after loading, `check_recipe_state`.
    """
    check_module(module)
    return {
        f"{name}.{_SUFFIX}" if name else _SUFFIX: torch.frombuffer(
            bytearray.fromhex(layer.recipe.fingerprint), dtype=torch.uint8
        )
        for name, layer in recipe_layers(module).items()
    }


def check_recipe_state(module: nn.Module, state: Mapping[str, Tensor]) -> None:
    """ValueError where `state`, which `recipe_state` made of the saved module, has other recipes than `module`."""
    expected = recipe_state(module)
    if not isinstance(state, Mapping) or not all(isinstance(value, Tensor) for value in state.values()):
        raise ValueError(f"state is {told(state)}; give the tensors by name that recipe_state made of the saved module")
    _check_names("recipe_state", state, expected)
    for name, mine in expected.items():
        if not torch.equal(mine, state[name].cpu()):
            saved = bytes(state[name].tolist()).hex()
            raise ValueError(
                f"{name} is {saved} in the checkpoint and {bytes(mine.tolist()).hex()} here; make the module with the "
                "recipe that the checkpoint was trained with"
            )


def recipes_json(module: nn.Module) -> str:
    """Recipe and fingerprint of each grouped layer, by name."""
    return json.dumps(
        {
            name: {"recipe": json.loads(layer.recipe.to_json()), "fingerprint": layer.recipe.fingerprint}
            for name, layer in recipe_layers(module).items()
        },
        sort_keys=True,
    )


def check_recipes_json(module: nn.Module, saved: Any) -> None:
    """ValueError where the recipes that `recipes_json` told are not those of `module`, with every difference."""
    layers = recipe_layers(module)
    _check_names("recipes", saved, layers)
    for name, layer in layers.items():
        try:
            recipe = Recipe.from_json(json.dumps(saved[name]["recipe"]))
            told = saved[name]["fingerprint"]
        except (KeyError, TypeError, OctavoError) as error:
            raise ValueError(f"the checkpoint's recipe of {name!r} cannot be read: {error}; save it again") from None
        if told != recipe.fingerprint:
            raise ValueError(
                f"the checkpoint's recipe of {name!r} has fingerprint {recipe.fingerprint} and says {told}; it was "
                "changed after it was saved"
            )
        if recipe.fingerprint != layer.recipe.fingerprint:
            different = "; ".join(map(str, octavo.diff(recipe, layer.recipe)))
            raise ValueError(
                f"{name!r} was saved with recipe {recipe.kind} and has {layer.recipe.kind} here ({different}); make it "
                "with the saved one, or load with recipes='any'"
            )


def _check_names(what: str, given: Mapping[str, Any], needed: Mapping[str, Any]) -> None:
    missing, unknown = sorted(needed.keys() - given.keys()), sorted(given.keys() - needed.keys())
    if missing or unknown:
        raise ValueError(
            f"{what} of the checkpoint lack {missing} and have {unknown}, which the module has not; give the module "
            "that was saved"
        )

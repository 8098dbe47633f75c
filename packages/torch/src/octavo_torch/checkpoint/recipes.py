"""The recipes of a module's grouped layers: as JSON in a file, or as fingerprints in a state dict."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn

import octavo
from octavo import OctavoError, Recipe
from octavo_torch.arrays.checks import brief, check_module
from octavo_torch.arrays.selection import listed, name_in, saved_modules
from octavo_torch.scaling.recipe_module import RecipeModule

_SUFFIX = "recipe_fingerprint"


def recipe_layers(module: nn.Module) -> dict[str, RecipeModule]:
    """The grouped layers of `module` by their names in its state dict, "" for the module itself."""
    return {name: layer for name, layer in saved_modules(module) if isinstance(layer, RecipeModule)}


def recipe_state(module: nn.Module) -> dict[str, Tensor]:
    """The fingerprint of each grouped layer's recipe as uint8 [8], to be saved together with the module's state dict.

    For torch.distributed.checkpoint, whose state dicts hold only tensors; call `check_recipe_state` after loading.
    """
    check_module(module)
    return {
        name_in(name, _SUFFIX): torch.frombuffer(bytearray.fromhex(layer.recipe.fingerprint), dtype=torch.uint8)
        for name, layer in recipe_layers(module).items()
    }


def check_recipe_state(module: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Raises ValueError where `state`, `recipe_state` of the saved module, has other recipes than `module`."""
    expected = recipe_state(module)
    if not isinstance(state, Mapping) or not all(isinstance(value, Tensor) for value in state.values()):
        raise ValueError(f"state is {brief(state)}; give the tensors that recipe_state returned for the saved module")
    _check_names(state, expected)
    for name, fingerprint in expected.items():
        if not torch.equal(fingerprint, state[name].cpu()):
            saved = bytes(state[name].tolist()).hex()
            raise ValueError(
                f"{name} is {saved} in the checkpoint and {bytes(fingerprint.tolist()).hex()} here; create the module "
                "with the recipe that the checkpoint was trained with"
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
    """Raises ValueError, naming every difference, where the recipes in `saved` are not those of `module`.

    saved   the parsed JSON of `recipes_json`
    """
    layers = recipe_layers(module)
    _check_names(saved, layers)
    for name, layer in layers.items():
        try:
            recipe = Recipe.from_json(json.dumps(saved[name]["recipe"]))
            fingerprint = saved[name]["fingerprint"]
        except (KeyError, TypeError, OctavoError) as error:
            raise ValueError(
                f"the checkpoint's recipe of {_shown(name)} cannot be read: {error}; save it again"
            ) from None
        if fingerprint != recipe.fingerprint:
            raise ValueError(
                f"the checkpoint's recipe of {_shown(name)} has fingerprint {recipe.fingerprint}, and the checkpoint "
                f"names {fingerprint}: it was changed after it was saved"
            )
        if recipe.fingerprint != layer.recipe.fingerprint:
            different = "; ".join(map(str, octavo.diff(recipe, layer.recipe)))
            raise ValueError(
                f"{_shown(name)} was saved with recipe {recipe.kind} and has {layer.recipe.kind} here ({different}); "
                "create it with the saved recipe, and give it another one by octavo_torch.convert after loading; or "
                "load with recipes='any' where only values differ"
            )


def _shown(name: str) -> str:
    """A layer's name for a message."""
    return repr(name) if name else "the module itself"


def _check_names(saved: Collection[str], needed: Collection[str]) -> None:
    missing, unknown = sorted(set(needed) - set(saved)), sorted(set(saved) - set(needed))
    found = [f"no recipe of {listed(missing)}"] if missing else []
    found += [f"recipes of {listed(unknown)}, which the module does not have as layers of Octavo"] if unknown else []
    if found:
        raise ValueError(
            f"the checkpoint has {', and '.join(found)}; make the module as it was when it was saved, by the same "
            "convert_linears if one made its layers"
        )

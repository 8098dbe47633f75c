"""Recipes by name, for config files and command lines; recipes from files."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from octavo.errors import RecipeError
from octavo.recipe_base import Recipe
from octavo.recipes import MXFP8, NVFP4, BlockScaling, CurrentScaling, DelayedScaling, HighPrecision, RowScaling

PRESETS: Mapping[str, Recipe] = MappingProxyType(
    {
        "bf16": HighPrecision(),
        "fp8-delayed": DelayedScaling(),
        "fp8-current": CurrentScaling(),
        "fp8-row": RowScaling(),
        "fp8-row-wgrad-high-precision": RowScaling(wgrad="high_precision"),
        "fp8-block": BlockScaling(),
        "fp8-block-fp32-scales": BlockScaling(power_of_two=False),
        "mxfp8": MXFP8(),
        "mxfp8-forward-only": MXFP8(dgrad="high_precision", wgrad="high_precision"),
        "mxfp8-square": MXFP8(square_weights=True),
        "nvfp4": NVFP4(),
        "nvfp4-wgrad-high-precision": NVFP4(wgrad="high_precision"),
    }
)
"""Named recipes. A kind ("row", "block", ...) is also a name: that of the recipe with its defaults."""

_MAX_FILE_BYTES = 1 << 20


def recipe(name: str) -> Recipe:
    """The preset called `name`, or the defaults of the kind `name`; `RecipeError` lists the known names."""
    preset = PRESETS.get(name)
    if preset is not None:
        return preset
    kinds = Recipe.kinds()
    if name in kinds:
        return kinds[name](kind=name)
    known = ", ".join([*PRESETS, *sorted(set(kinds) - set(PRESETS))])
    raise RecipeError(f"recipe: got {name!r}; known names are {known}")


def load_recipe(path: str | os.PathLike[str]) -> Recipe:
    """The recipe in a `.json` or `.toml` file; `RecipeError` names the file and the problem."""
    file = Path(path)
    if file.suffix not in (".json", ".toml"):
        raise RecipeError(f"{file}: a recipe file ends in .json or .toml")
    try:
        with file.open("rb") as stream:
            content = stream.read(_MAX_FILE_BYTES + 1)
    except OSError as error:
        raise RecipeError(f"{file}: cannot be read ({error.strerror})") from None
    if len(content) > _MAX_FILE_BYTES:
        raise RecipeError(f"{file}: larger than {_MAX_FILE_BYTES} bytes; a recipe file is smaller")
    try:
        text = content.decode()
        return Recipe.from_json(text) if file.suffix == ".json" else Recipe.from_toml(text)
    except UnicodeDecodeError:
        raise RecipeError(f"{file}: not UTF-8 text") from None
    except RecipeError as error:
        raise RecipeError(f"{file}: {error}") from None

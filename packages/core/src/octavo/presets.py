"""Recipes by name, for config files and command lines; recipes from files."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from octavo.errors import RecipeError, did_you_mean, shown
from octavo.recipe_base import MOST_BYTES, Recipe
from octavo.recipes import (
    MXFP8,
    NVFP4,
    BlockScaling,
    CurrentScaling,
    DelayedScaling,
    HighPrecision,
    MXFP4Weights,
    RowScaling,
)

PRESETS: Mapping[str, Recipe] = MappingProxyType(
    {
        "bf16": HighPrecision(),
        "fp8-delayed": DelayedScaling(),
        "fp8-current": CurrentScaling(),
        "fp8-row": RowScaling(),
        "fp8-row-wgrad-high-precision": RowScaling(wgrad="high_precision"),
        "fp8-block": BlockScaling(),
        "fp8-block-fp32-scales": BlockScaling(power_of_two=False),
        "fp8-block-square-columns": BlockScaling(square_columns=True),
        "fp8-block-wgrad-high-precision": BlockScaling(wgrad="high_precision"),
        "mxfp4": MXFP4Weights(),
        "mxfp8": MXFP8(),
        "mxfp8-forward-only": MXFP8(dgrad="high_precision", wgrad="high_precision"),
        "mxfp8-folded": MXFP8(products="folded"),
        "mxfp8-square": MXFP8(square_weights=True),
        "nvfp4": NVFP4(),
        "nvfp4-wgrad-high-precision": NVFP4(wgrad="high_precision"),
    }
)
"""Named recipes. A kind ("row", "block", ...) is also a name: that of the recipe with its defaults."""


def recipe(name: str, **changes: Any) -> Recipe:
    """The preset called `name`, or the defaults of the kind `name`; `RecipeError` lists the known names.

    changes   other values of some fields: `octavo.recipe("mxfp8", wgrad="high_precision")`
    """
    if not isinstance(name, str):
        raise RecipeError(f"recipe: got {shown(name)}, a {type(name).__name__}; give the name of a preset or a kind")
    preset = PRESETS.get(name)
    kinds = Recipe.kinds()
    if preset is None and name in kinds:
        preset = kinds[name](kind=name)
    if preset is not None:
        return preset.replace(**changes) if changes else preset
    known = [*PRESETS, *sorted(set(kinds) - set(PRESETS))]
    of_classes = {kinds[kind].__name__: kind for kind in kinds}
    hint = f"; did you mean {of_classes[name]}?" if name in of_classes else did_you_mean(name, known)
    raise RecipeError(f"recipe: got {shown(name)}{hint}; known names are {', '.join(known)}")


def load_recipe(path: str | os.PathLike[str]) -> Recipe:
    """The recipe in a `.json` or `.toml` file; `RecipeError` names the file and the problem."""
    file = Path(path)
    if file.suffix not in (".json", ".toml"):
        raise RecipeError(f"{file}: a recipe file ends in .json or .toml")
    try:
        with file.open("rb") as stream:
            content = stream.read(MOST_BYTES + 1)
    except OSError as error:
        raise RecipeError(f"{file}: cannot be read ({error.strerror})") from None
    if len(content) > MOST_BYTES:
        raise RecipeError(f"{file}: larger than {MOST_BYTES} bytes; a recipe file is smaller")
    try:
        text = content.decode()
        return Recipe.from_json(text) if file.suffix == ".json" else Recipe.from_toml(text)
    except UnicodeDecodeError:
        raise RecipeError(f"{file}: not UTF-8 text") from None
    except RecipeError as error:
        raise RecipeError(f"{file}: {error}") from None

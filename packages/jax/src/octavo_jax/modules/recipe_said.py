"""A module's recipe that nobody has given: high precision, and a warning at the line that made the module."""

from __future__ import annotations

import warnings
from typing import Any

from octavo.caller import place_of_caller
from octavo.unsaid import Unsaid, without_recipe
from octavo_jax.arrays.recipes import RecipeLike

_said: dict[Any, Any] = {}  # as a module's __warningregistry__, for Python's rule of one warning per place


def recipe_said(module: object, recipe: RecipeLike | Unsaid) -> RecipeLike:
    """`recipe`; None with a warning where none was given."""
    if not isinstance(recipe, Unsaid):
        return recipe
    place = place_of_caller()
    warnings.warn_explicit(without_recipe(module), UserWarning, place.file, place.line, registry=_said)
    return None

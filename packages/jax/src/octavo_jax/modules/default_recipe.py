"""The recipe of a module that was made without one: high precision, and a warning at the line that made the module."""

from __future__ import annotations

from octavo.unsaid import Unsaid, warn_without_recipe
from octavo_jax.arrays.recipes import RecipeLike


def recipe_or_default(module: object, recipe: RecipeLike | Unsaid) -> RecipeLike:
    """`recipe` as it was given; where it was left out, None for high precision, and a warning."""
    if not isinstance(recipe, Unsaid):
        return recipe
    warn_without_recipe(module)
    return None

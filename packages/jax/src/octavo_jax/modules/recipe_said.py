"""A module's recipe that nobody has given: high precision, and a warning at the line that made the module."""

from __future__ import annotations

from octavo.unsaid import Unsaid, warn_without_recipe
from octavo_jax.arrays.recipes import RecipeLike


def recipe_said(module: object, recipe: RecipeLike | Unsaid) -> RecipeLike:
    """`recipe`; None with a warning where none was given."""
    if not isinstance(recipe, Unsaid):
        return recipe
    warn_without_recipe(module)
    return None

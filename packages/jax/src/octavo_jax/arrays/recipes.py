"""The argument `recipe` of every public function: a Recipe, the name of one, or None."""

from __future__ import annotations

from typing import cast

from octavo import DelayedScaling, Recipe
from octavo import recipe as recipe_named

RecipeLike = Recipe | str | None
"""A recipe, the name of one with its defaults (`octavo.recipe`), or None for high precision."""


def as_recipe(recipe: object) -> Recipe | None:
    """The recipe that the argument means; RecipeError for an unknown name, ValueError for anything else."""
    # with pydantic 2.10 isinstance runs Python code of its metaclass, and every call comes past here
    if recipe is None or Recipe in type(recipe).__mro__:
        return cast(Recipe | None, recipe)
    if isinstance(recipe, str):
        return recipe_named(recipe)
    given = f"the class {recipe.__name__}" if isinstance(recipe, type) else f"a {type(recipe).__name__}"
    hint = f", such as octavo.{recipe.__name__}()" if isinstance(recipe, type) and issubclass(recipe, Recipe) else ""
    raise ValueError(f"recipe is {given}; give a Recipe{hint}, the name of one, or None for high precision")


def as_delayed(recipe: DelayedScaling | str) -> DelayedScaling:
    """The recipe of delayed scaling that the argument means; ValueError for a recipe that keeps no state."""
    found = as_recipe(recipe)
    if not isinstance(found, DelayedScaling):
        kind = "None" if found is None else repr(found.kind)
        raise ValueError(f"recipe is {kind}, which keeps no state; give octavo.DelayedScaling(...) or its name")
    return found

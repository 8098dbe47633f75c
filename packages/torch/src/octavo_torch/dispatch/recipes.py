"""Recipes by name and variants of a recipe, one object each: layers are remembered by the identity of their recipe."""

from __future__ import annotations

import octavo_registry as registry
from octavo import HighPrecision, Recipe
from octavo.formats import DType
from octavo_torch.arrays.checks import check_recipe
from octavo_torch.memo import Bounded, Memo

_HIGH_PRECISION = HighPrecision()
_named: Bounded[str, Recipe] = Bounded()
_variants: Memo[Recipe] = Memo()


def recipe_of(recipe: Recipe | str | None) -> Recipe:
    """The recipe, the one of that name, or HighPrecision for None; raises ValueError for anything else."""
    if recipe is None:
        return _HIGH_PRECISION
    if isinstance(recipe, str):
        found = _named.get(recipe)
        if found is None:
            found = _named[recipe] = registry.recipe(recipe)
        return found
    check_recipe(recipe)
    return recipe


def with_output_dtype(recipe: Recipe, dtype: DType | None) -> Recipe:
    """`recipe` with another `output_dtype`, the same object for the same pair."""

    def variant() -> Recipe:
        return type(recipe)(**{**recipe.model_dump(), "output_dtype": dtype})

    return _variants.get((id(recipe), dtype), variant, recipe)

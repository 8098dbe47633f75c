"""Variants of a recipe, one object each: layers are remembered by the identity of their recipe."""

from __future__ import annotations

from octavo import Recipe
from octavo.formats import DType
from octavo_torch.memo import Memo

_variants: Memo[Recipe] = Memo()


def with_output_dtype(recipe: Recipe, dtype: DType | None) -> Recipe:
    """`recipe` with another `output_dtype`, the same object for the same pair."""

    def variant() -> Recipe:
        return type(recipe)(**{**recipe.model_dump(), "output_dtype": dtype})

    return _variants.get((id(recipe), dtype), variant, recipe)

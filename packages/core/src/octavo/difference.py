"""The differences between two recipes, printable."""

from __future__ import annotations

from dataclasses import dataclass

from octavo.errors import RecipeError, shown
from octavo.recipe_base import Recipe


@dataclass(frozen=True, slots=True)
class Difference:
    """One field whose value differs between two recipes; None means that the recipe has no such field."""

    field: str
    left: str | None
    right: str | None

    def __str__(self) -> str:
        return f"{self.field}: {self.left or '(no such field)'} -> {self.right or '(no such field)'}"


def _shown(recipe: Recipe, field: str) -> str | None:
    if field not in type(recipe).model_fields:
        return None
    value = getattr(recipe, field)
    if isinstance(value, frozenset):
        return "{" + ", ".join(sorted(value)) + "}"
    return str(value)


def diff(left: Recipe, right: Recipe) -> tuple[Difference, ...]:
    """The fields in which the recipes differ, in field order: empty where the fingerprints are equal.

    Raises RecipeError for what is no recipe.
    """
    for side, given in (("left", left), ("right", right)):
        if not isinstance(given, Recipe):
            raise RecipeError(f"{side} is {shown(given)}; give a recipe, as octavo.recipe(name) returns it")
    fields = dict.fromkeys([*type(left).model_fields, *type(right).model_fields])
    rows = (Difference(field, _shown(left, field), _shown(right, field)) for field in fields)
    return tuple(row for row in rows if row.left != row.right)

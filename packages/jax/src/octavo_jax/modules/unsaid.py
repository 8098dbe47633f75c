"""A module's recipe that nobody has given: high precision, and a warning at the line that made the module."""

from __future__ import annotations

import sys
import warnings
from enum import Enum
from pathlib import Path

import flax

from octavo import renamed
from octavo_jax.arrays.recipes import RecipeLike


class Unsaid(Enum):
    """The default of an argument that is better given."""

    UNSAID = "not given"

    def __repr__(self) -> str:
        return self.value


UNSAID = Unsaid.UNSAID

_FLAX, _OURS = Path(flax.__file__).parent, Path(__file__).parents[1]
_INSIDE = (str(_FLAX), str(_OURS), renamed.__file__, "<")
"""Files of the code between a module's constructor and the line that calls it."""


def recipe_said(module: object, recipe: RecipeLike | Unsaid) -> RecipeLike:
    """`recipe`; None with a warning where none was given."""
    if not isinstance(recipe, Unsaid):
        return recipe
    warnings.warn(
        f"{type(module).__name__} was created without a recipe and computes in high precision; give one, such as "
        "recipe='mxfp8', or recipe=None if that is intended",
        stacklevel=_depth(),
    )
    return None


def _depth() -> int:
    """The `stacklevel`, in `recipe_said`, of the first frame that is neither Flax's nor this package's."""
    depth, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_INSIDE):
        depth, frame = depth + 1, frame.f_back
    return depth

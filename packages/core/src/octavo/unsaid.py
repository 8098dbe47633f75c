"""UNSAID: the default of a module's recipe, and the warning that a module without one computes in high precision."""

from __future__ import annotations

import warnings
from enum import Enum

from octavo.caller import stacklevel_of_caller


class Unsaid(Enum):
    """The type of UNSAID, which tells an argument that was left out from one that is None."""

    UNSAID = "not given"

    def __repr__(self) -> str:
        return self.value


UNSAID = Unsaid.UNSAID


def warn_without_recipe(module: object) -> None:
    """Warn at the line that creates `module`."""
    warnings.warn(
        f"{type(module).__name__} was created without a recipe and computes in high precision; give one, such as "
        "recipe='mxfp8', or recipe=None if that is intended",
        stacklevel=stacklevel_of_caller(),
    )

"""A recipe that nobody gave to a module, which then computes in high precision and says so in each framework."""

from __future__ import annotations

import warnings
from enum import Enum

from octavo.caller import stacklevel_of_caller


class Unsaid(Enum):
    """The default of an argument that is better given."""

    UNSAID = "not given"

    def __repr__(self) -> str:
        return self.value


UNSAID = Unsaid.UNSAID


def warn_without_recipe(module: object) -> None:
    """A UserWarning at the line that makes `module`."""
    warnings.warn(
        f"{type(module).__name__} was created without a recipe and computes in high precision; give one, such as "
        "recipe='mxfp8', or recipe=None if that is intended",
        stacklevel=stacklevel_of_caller(),
    )

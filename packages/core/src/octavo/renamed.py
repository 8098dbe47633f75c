"""Arguments that have a new name: the old one is taken for a release, with a DeprecationWarning.

Type checkers and `help` know the new name alone.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import wraps
from inspect import signature
from typing import ParamSpec, TypeVar

from octavo.caller import stacklevel_of_caller

P = ParamSpec("P")
Result = TypeVar("Result")
Kind = TypeVar("Kind", bound=type)


def renamed_arguments(**names: str) -> Callable[[Callable[P, Result]], Callable[P, Result]]:
    """A decorator: the function takes arguments by their old names, too. names: the new ones by the old.

    A call that gives both names of one raises TypeError.
    """

    def decorate(function: Callable[P, Result]) -> Callable[P, Result]:
        places = {name: place for place, name in enumerate(signature(function).parameters)}

        @wraps(function)
        def called(*args: P.args, **given: P.kwargs) -> Result:
            for old, new in names.items():
                if old not in given:
                    continue
                if new in given or len(args) > places[new]:
                    raise TypeError(f"{old} is called {new} now, and both were given; give {new} alone")
                warnings.warn(
                    f"{old} is called {new} now; give {new}, for a later release will not know {old}",
                    DeprecationWarning,
                    stacklevel=stacklevel_of_caller(),
                )
                given[new] = given.pop(old)
            return function(*args, **given)

        return called

    return decorate


def renamed_fields(**names: str) -> Callable[[Kind], Kind]:
    """A decorator of classes: what `renamed_arguments` is, for the `__init__` that a dataclass makes of its fields."""

    def decorate(kind: Kind) -> Kind:
        kind.__init__ = renamed_arguments(**names)(kind.__init__)  # type: ignore[misc]
        return kind

    return decorate

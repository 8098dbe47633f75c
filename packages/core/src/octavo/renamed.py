"""Decorators for arguments that have a new name: the old one is accepted for a release, with a DeprecationWarning.

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
    """A decorator: the function accepts arguments by their old names, too.

    names   each new name, under the old one: `@renamed_arguments(old="new")`

    A call that gives an argument by both of its names raises TypeError.
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
    """`renamed_arguments` for the fields of a dataclass, which its `__init__` takes as arguments."""

    def decorate(kind: Kind) -> Kind:
        kind.__init__ = renamed_arguments(**names)(kind.__init__)  # type: ignore[misc]
        return kind

    return decorate

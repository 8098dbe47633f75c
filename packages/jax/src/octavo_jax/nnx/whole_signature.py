"""Signatures of modules with every keyword argument by name, also those that __init__ passes on to its base classes.

A module's __init__ takes its own arguments and `**common` for its base classes; `help`, `inspect` and documentation
tools would show no more than that.
"""

from __future__ import annotations

import inspect
from typing import TypeVar

Module = TypeVar("Module", bound=type)


def all_parameters(module: type) -> dict[str, inspect.Parameter]:
    """The parameters of __init__ and of each base class's __init__ that gets its keywords; positional ones first."""
    parameters: dict[str, inspect.Parameter] = {}
    for base in module.__mro__:
        if "__init__" not in vars(base):
            continue
        own = list(inspect.signature(vars(base)["__init__"]).parameters.values())[1:]
        for one in own:
            positional = base is module and one.kind is one.POSITIONAL_OR_KEYWORD
            if positional or one.kind is one.KEYWORD_ONLY:
                parameters.setdefault(one.name, one)
        if all(one.kind is not one.VAR_KEYWORD or one.name == "unknown" for one in own):
            break
    return dict(sorted(parameters.items(), key=lambda item: item[1].kind))


def with_whole_signature(module: Module) -> Module:
    """A class decorator, after which the module's signature shows `all_parameters`."""
    signature = inspect.Signature(list(all_parameters(module).values()))
    module.__signature__ = signature  # type: ignore[attr-defined]
    return module

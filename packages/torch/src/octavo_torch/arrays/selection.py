"""Names of modules: which of them a filter selects, and the names of their parts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from fnmatch import fnmatchcase

from torch import nn

from octavo_torch.arrays.checks import brief

Selection = str | Callable[[str, nn.Module], bool]
"""A pattern of whole names, such as "model.layers.*.experts", or a function of name and module."""

Filter = Selection | None
"""The same, or None for all."""

_WRAPPED = "_checkpoint_wrapped_module"
"""What torch.distributed.algorithms._checkpoint.checkpoint_wrapper calls the module that it wraps."""

_MOST_NAMES = 12


def listed(names: Iterable[str]) -> str:
    """Names of modules for a message: the first ones, and how many more there are."""
    every = [name or "'' (the model itself)" for name in names]
    more = f" and {len(every) - _MOST_NAMES} more" if len(every) > _MOST_NAMES else ""
    return f"{', '.join(every[:_MOST_NAMES])}{more}"


def check_filter(filter: object, needed: bool = False) -> None:
    """Raises ValueError for anything but a Filter, and for None where a selection is `needed`."""
    if (filter is None and not needed) or isinstance(filter, str) or callable(filter):
        return
    none = "" if needed else ", or None"
    raise ValueError(f"filter is {brief(filter)}; give a pattern of names, a function of name and module{none}")


def selects(filter: Filter, name: str, module: nn.Module) -> bool:
    """True where `filter` means the module of this name."""
    if filter is None:
        return True
    return fnmatchcase(name, filter) if isinstance(filter, str) else bool(filter(name, module))


def saved_name(name: str) -> str:
    """The name that state dicts have for the module called `name`: torch's wrapper for activation checkpointing takes
    its own part out of theirs."""
    return ".".join(part for part in name.split(".") if part != _WRAPPED)


def saved_modules(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The modules in `module`, itself as "", by their `saved_name`."""
    return ((saved_name(name), part) for name, part in module.named_modules())


def name_in(module: str, part: str) -> str:
    """The name in a model of a part of the module called `module`, which is "" for the model itself."""
    return f"{module}.{part}" if module else part

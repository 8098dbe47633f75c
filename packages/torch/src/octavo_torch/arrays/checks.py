"""Arguments that many functions take, checked; and values as messages quote them, in one line."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from octavo import QuantizerSpec, Recipe
from octavo_torch.arrays.dtypes import DTYPE_NAMES, name_of

_QUOTED = (str, int, float, type(None), torch.dtype, torch.device)
_LONGEST = 60


def told(value: Any) -> str:
    """`value` where that is short, a tensor's dtype and shape, else "a <type>"."""
    if isinstance(value, Tensor):
        return f"{name_of(value.dtype)} {list(value.shape)}"
    quoted = repr(value) if isinstance(value, _QUOTED) else ""
    return quoted if 0 < len(quoted) <= _LONGEST else f"a {type(value).__name__}"


def check_recipe(recipe: Any) -> None:
    """ValueError for anything but a Recipe."""
    if not isinstance(recipe, Recipe):
        raise ValueError(f"recipe is {told(recipe)}; give a Recipe, octavo.recipe(name) makes one from a name")


def check_spec(name: str, spec: Any) -> None:
    """ValueError for anything but a QuantizerSpec."""
    if not isinstance(spec, QuantizerSpec):
        raise ValueError(f"{name} is {told(spec)}; give a QuantizerSpec, recipe.quantizer('x') makes one")


def backend_names(backend: str | Sequence[str] | None) -> str | tuple[str, ...] | None:
    """`backend` as a name, a tuple of names or None; ValueError for anything else."""
    if backend is None or isinstance(backend, str):
        return backend
    names = tuple(backend) if isinstance(backend, Sequence) else ()
    if not names or not all(isinstance(name, str) for name in names):
        raise ValueError(f"backend is {told(backend)}; give a name, several in order of preference, or None")
    return names


def check_module(module: Any) -> None:
    """ValueError for anything but a module."""
    if not isinstance(module, nn.Module):
        raise ValueError(f"module is {told(module)}; give a torch.nn.Module")


def check_path(name: str, value: Any) -> None:
    """ValueError for anything but a path or its text."""
    if not isinstance(value, str | Path):
        raise ValueError(f"{name} is {told(value)}; give a pathlib.Path or a str")


def check_flag(name: str, value: Any) -> None:
    """ValueError for anything but True and False."""
    if not isinstance(value, bool):
        raise ValueError(f"{name} is {told(value)}; give True or False")


def check_count(name: str, value: Any) -> None:
    """ValueError for anything but an integer of at least 1 that counts something in memory."""
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value < 1 << 31:
        raise ValueError(f"{name} is {told(value)}; give an integer of at least 1 and below 2^31")


def check_place(device: Any, dtype: Any = None) -> None:
    """ValueError where nothing can be made on `device`, or parameters are never of `dtype`."""
    try:
        torch.empty(0, device=device)
    except (RuntimeError, TypeError, ValueError, AssertionError) as error:
        raise ValueError(f"device is {told(device)}; give a torch.device of this machine or its name") from error
    if dtype is not None:
        check_dtype(dtype)


def check_dtype(dtype: Any) -> None:
    """ValueError where parameters are never of `dtype`."""
    if not isinstance(dtype, torch.dtype) or dtype not in DTYPE_NAMES:
        raise ValueError(f"dtype is {told(dtype)}; give torch.bfloat16, torch.float16 or torch.float32")

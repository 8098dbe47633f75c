"""Checks for common arguments, and one-line formatting of values for error messages."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

import octavo_registry as registry
from octavo import QuantizerSpec, Recipe
from octavo_torch.arrays.dtypes import DTYPE_NAMES, name_of

BackendNames = str | Sequence[str] | None
"""What `backend=` takes: one backend, several in order of preference, or None for the registry's preference."""

HashableNames = str | tuple[str, ...] | None
"""The same as `backend_names` returns it, so that it can be a part of a memo's key."""

_SHOWN = (str, int, float, type(None), torch.dtype, torch.device)
_MAX_LENGTH = 60


def brief(value: object) -> str:
    """`value` for an error message: its repr where that is short, of names in a collection, too; a tensor's dtype and
    shape; else "a <type>"."""
    if isinstance(value, Tensor):
        if value.is_nested:  # which may have no shape
            return "a nested tensor"
        return f"{name_of(value.dtype)} {list(value.shape)}"
    names = isinstance(value, list | tuple | set | frozenset) and {type(one) for one in value} == {str}
    text = repr(value) if names or isinstance(value, _SHOWN) else ""
    return text if 0 < len(text) <= _MAX_LENGTH else f"a {type(value).__name__}"


def on_another_device(name: str, device: torch.device, other: str, wanted: torch.device) -> ValueError:
    """What to raise for an argument that is on `device`, where `other` is on `wanted`."""
    return ValueError(f"{name} is on {device} and {other} on {wanted}; move {name} to {wanted}")


def check_recipe(recipe: object) -> None:
    """Raises ValueError for anything but a Recipe."""
    if isinstance(recipe, type) and issubclass(recipe, Recipe):
        raise ValueError(f"recipe is the class {recipe.__name__}; give a recipe, such as {recipe.__name__}()")
    if not isinstance(recipe, Recipe):
        raise ValueError(f"recipe is {brief(recipe)}; give a Recipe or the name of one, such as 'mxfp8'")


def check_spec(name: str, spec: object) -> None:
    """Raises ValueError for anything but a QuantizerSpec."""
    if not isinstance(spec, QuantizerSpec):
        raise ValueError(f"{name} is {brief(spec)}; give a QuantizerSpec, such as recipe.quantizer('x')")


def backend_names(backend: BackendNames) -> HashableNames:
    """`backend` as a name, a tuple of names or None; raises ValueError for anything else."""
    if backend is None or isinstance(backend, str):
        return backend
    names = tuple(backend) if isinstance(backend, Sequence) else ()
    if not names or not all(isinstance(name, str) for name in names):
        raise ValueError(f"backend is {brief(backend)}; give a name, several in order of preference, or None")
    return names


def known_backends(backend: BackendNames) -> HashableNames:
    """`backend_names` of a module that is constructed; raises UnknownBackendError for a name that nobody has, too."""
    names = backend_names(backend)
    if names is not None:
        registry.check_backend(names)
    return names


def check_module(module: object) -> None:
    """Raises ValueError for anything but a module."""
    if not isinstance(module, nn.Module):
        raise ValueError(f"module is {brief(module)}; give a torch.nn.Module")


def check_path(name: str, value: object) -> None:
    """Raises ValueError for anything but a pathlib.Path or a str of which the file system can say what is there; an
    empty str would be the working directory."""
    if not isinstance(value, str | Path) or value == "":
        raise ValueError(f"{name} is {brief(value)}; give a pathlib.Path or a str")
    try:
        os.fsencode(value)
        Path(value).exists()
    except UnicodeError:
        raise ValueError(f"{name} is {brief(value)}, which has no bytes in a file system; give another path") from None
    except OSError as error:
        raise ValueError(f"{name} is {brief(value)}: {error.strerror}; give another path") from None


def check_flag(name: str, value: object) -> None:
    """Raises ValueError for anything but True and False."""
    if not isinstance(value, bool):
        raise ValueError(f"{name} is {brief(value)}; give True or False")


def check_count(name: str, value: object) -> None:
    """Raises ValueError for anything but an integer from 1 to 2^31 - 1: a number of things that fit in memory."""
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value < 1 << 31:
        raise ValueError(f"{name} is {brief(value)}; give an integer of at least 1 and below 2^31")


def check_device(device: torch.device | str | int | None, dtype: object = None) -> None:
    """Raises ValueError where tensors cannot be created on `device`, or parameters cannot have `dtype`."""
    try:
        torch.empty(0, device=device)
    except (RuntimeError, TypeError, ValueError, AssertionError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
        raise ValueError(
            f"device is {brief(device)}, and torch makes no tensor there: {reason}; give a torch.device of this "
            "machine or its name"
        ) from error
    if dtype is not None:
        check_dtype(dtype)


def check_dtype(dtype: object) -> None:
    """Raises ValueError where parameters cannot have `dtype`."""
    if not isinstance(dtype, torch.dtype) or dtype not in DTYPE_NAMES:
        raise ValueError(f"dtype is {brief(dtype)}; give torch.bfloat16, torch.float16 or torch.float32")

"""The argument `backend` of every public function."""

from __future__ import annotations

from collections.abc import Sequence

import octavo_registry as registry

BackendNames = str | Sequence[str] | None
"""A backend, a closed list of backends, or whatever the registry prefers."""


def hashable(backend: BackendNames) -> str | tuple[str, ...] | None:
    """The same names as a key of caches and a static argument; ValueError unless they are names."""
    if backend is None or isinstance(backend, str):
        return backend
    names = tuple(backend) if isinstance(backend, Sequence) else ()
    if not names or not all(isinstance(name, str) for name in names):
        given = repr(backend) if isinstance(backend, int | float | list | tuple) else f"a {type(backend).__name__}"
        raise ValueError(f"backend is {given}; give a name, several in order of preference, or None")
    return names


def check_known(backend: BackendNames) -> None:
    """Raises ValueError for the `backend` of a module that is constructed if no call could take it."""
    names = hashable(backend)
    if names is not None:
        registry.check_backend(names)

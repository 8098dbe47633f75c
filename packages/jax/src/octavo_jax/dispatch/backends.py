"""The argument `backend` of every public function."""

from __future__ import annotations

from collections.abc import Sequence

BackendNames = str | Sequence[str] | None
"""A backend, a closed list of backends, or whatever the registry prefers."""


def hashable(backend: BackendNames) -> str | tuple[str, ...] | None:
    """The same names as a key of caches and a static argument."""
    return backend if backend is None or isinstance(backend, str) else tuple(backend)

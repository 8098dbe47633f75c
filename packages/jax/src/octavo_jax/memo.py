"""Plans, and what is built of them, kept by key: interned objects, and values that depend on the registry's state."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

from octavo_registry import state_token

T = TypeVar("T")

_MOST = 512


class Interned(Generic[T]):
    """One object for equal keys: JAX compares a static argument by identity, and traces once for one object.

    All are forgotten when there are too many.
    """

    def __init__(self) -> None:
        self._objects: dict[Hashable, T] = {}

    def of(self, key: Hashable, build: Callable[[], T]) -> T:
        """The object of `key`, built where there is none."""
        interned = self._objects.get(key)
        if interned is None:
            if len(self._objects) >= _MOST:
                self._objects.clear()
            interned = self._objects[key] = build()
        return interned


class Memo(Generic[T]):
    """Values by key, each of which holds until the registry's state changes: a plan, and what is built of plans.

    A key may hold the id of its owner in place of the owner, whose hash is slow: the value of another owner with that
    id is not returned.
    """

    def __init__(self) -> None:
        self._values: dict[Hashable, tuple[object, object, T]] = {}

    def get(self, key: Hashable, build: Callable[[], T], owner: object = None) -> T:
        """The value of `key`, built where there is none."""
        token = state_token()  # of this thread, and read before building, so that a change meanwhile is noticed
        known = self._values.get(key)
        if known is not None and known[0] is token and known[1] is owner:
            return known[2]
        value = build()
        if len(self._values) >= _MOST:
            self._values.clear()
        self._values[key] = token, owner, value
        return value

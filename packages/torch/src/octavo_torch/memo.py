"""Memory of what was computed before: bounded dictionaries, and values that hold until the registry's state changes."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

import octavo_registry as registry

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")

_state_token = registry.state_token


class Bounded(dict[K, T]):
    """A dictionary that is emptied before it would exceed `limit` entries, for programs whose keys never repeat.

    Looking up costs what it costs in a plain dictionary: only assignment is a Python call.
    """

    limit = 1024

    def __setitem__(self, key: K, value: T) -> None:
        """Stores `value`, if need be as the only entry."""
        if len(self) >= self.limit:
            self.clear()
        super().__setitem__(key, value)


class Memo(Generic[T]):
    """At most `Bounded.limit` values, each of which holds until the registry's state changes."""

    __slots__ = ("_entries",)

    def __init__(self) -> None:
        self._entries: Bounded[Hashable, tuple[object, object, T]] = Bounded()

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: Hashable, compute: Callable[[], T], owner: object = None) -> T:
        """The value of `key`, computed where there is none.

        owner   an object whose id is part of the key, kept alive and compared: ids are used again
        """
        token = _state_token()  # read before computing, so that a change in the meantime invalidates the value
        entry = self._entries.get(key)
        if entry is not None and entry[0] is token and entry[1] is owner:
            return entry[2]
        value = compute()
        self._entries[key] = token, owner, value
        return value

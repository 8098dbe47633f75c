"""A bounded memo of what was decided."""

from __future__ import annotations

from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")

LIMIT = 4096
"""Far more than the operations of a model. Only a process that keeps planning new shapes reaches it."""


class Memo(dict[K, V]):
    """A dict of at most `limit` items: one more drops the oldest."""

    def __init__(self, limit: int = LIMIT) -> None:
        super().__init__()
        self._limit = limit

    def __setitem__(self, key: K, value: V) -> None:
        if key not in self and len(self) >= self._limit:
            del self[next(iter(self))]
        super().__setitem__(key, value)

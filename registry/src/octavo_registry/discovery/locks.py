"""A lock that a forked child does not inherit in another thread's hands."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from types import TracebackType
from weakref import WeakSet


class ForkSafeLock:
    """A reentrant lock. In a child that was forked while another thread held it, it is a new one.

    That thread is not there to release it: a data loader's worker, forked while the first layer imports its backend,
    would wait for ever.

    abandoned   called in such a child: what the lock guards may be half changed
    """

    def __init__(self, abandoned: Callable[[], None] = lambda: None) -> None:
        self._lock = threading.RLock()
        self._abandoned = abandoned
        _locks.add(self)

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._lock.release()

    def renew(self) -> bool:
        """True where another thread held it."""
        if self._lock.acquire(blocking=False):  # free, or the forking thread's own
            self._lock.release()
            return False
        self._lock = threading.RLock()
        return True


_locks: WeakSet[ForkSafeLock] = WeakSet()


def _after_fork() -> None:
    # all of them first: to mend what one guards may take another
    for lock in [lock for lock in _locks if lock.renew()]:
        lock._abandoned()


if hasattr(os, "register_at_fork"):  # not on Windows, which does not fork
    os.register_at_fork(after_in_child=_after_fork)

"""Which backends serve a run: noted as plans are made."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import octavo_registry
from octavo_registry import Plan, Request, hookimpl

_NAME = "octavo-train-notes"


class BackendNotes:
    """The operations that each backend serves, by its name, in the order in which they were first asked for."""

    def __init__(self) -> None:
        self._served: dict[str, dict[str, None]] = {}

    @hookimpl
    def octavo_plan_made(self, plan: Plan, request: Request) -> None:
        """Note the plan's backend."""
        self._served.setdefault(plan.backend, {})[request.op] = None

    @property
    def served(self) -> dict[str, tuple[str, ...]]:
        """Operations by backend."""
        return {name: tuple(operations) for name, operations in self._served.items()}


@contextmanager
def noted_backends() -> Iterator[BackendNotes]:
    """Inside the block every plan is made anew, and its backend is noted."""
    notes = BackendNotes()
    octavo_registry.register(notes, _NAME)
    try:
        yield notes
    finally:
        octavo_registry.unregister(_NAME)

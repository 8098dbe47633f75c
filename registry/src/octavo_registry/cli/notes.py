"""What installed packages say of themselves in `octavo doctor`: functions of the entry-point group `octavo.doctor`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from octavo_registry.discovery.entry_points import published
from octavo_registry.discovery.guard import Fault, guard

GROUP = "octavo.doctor"


@dataclass(frozen=True, slots=True)
class Note:
    """What one package says: how it was built, what it lacks here and how to get it.

    lines   sentences; () where the function failed
    reason  why there are none; "" otherwise
    """

    name: str
    distribution: str
    version: str
    lines: tuple[str, ...]
    reason: str = ""


def _lines(function: Any) -> tuple[str, ...]:
    lines = tuple(function())
    if not all(isinstance(line, str) for line in lines):
        raise TypeError(f"{function!r} gave {lines!r}; a function of {GROUP} returns strings, each one sentence")
    return lines


def notes() -> tuple[Note, ...]:
    """Every package's note by name. Each function is loaded and called in a guard."""
    published_notes = []
    for entry in published(GROUP):
        try:
            lines, reason = guard(_lines, entry.load()), ""
        except Fault as fault:
            lines, reason = (), str(fault)
        published_notes.append(Note(entry.name, entry.distribution, entry.version, lines, reason))
    return tuple(sorted(published_notes, key=lambda note: (note.name, note.distribution)))

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
    answer = function()
    alone = isinstance(answer, str)  # it is iterable, over its letters
    lines = [] if alone or answer is None else list(answer)
    if alone or answer is None or not all(isinstance(line, str) for line in lines):
        name = getattr(function, "__name__", type(function).__name__)
        given = f"{answer!r} by itself" if alone else repr(lines or answer)
        raise TypeError(f"{name} gave {given}; a function of {GROUP} returns a list of sentences")
    return tuple(lines)


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

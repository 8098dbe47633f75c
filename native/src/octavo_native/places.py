"""Places: how the launches of a Sequence name their arrays."""

from __future__ import annotations

from octavo_native._native import PLACE_BITS


def place(number: int, offset: int = 0) -> int:
    """The place `offset` bytes into the `number`-th of the arrays that Sequence.run is given, counted from 1."""
    return number << PLACE_BITS | offset

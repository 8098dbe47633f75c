"""Checks of arguments that are no arrays."""

from __future__ import annotations


def check_count(name: str, value: object) -> None:
    """ValueError for anything but an integer from 1 to 2^31 - 1: a number of things that fit in memory."""
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value < 1 << 31:
        raise ValueError(f"{name} is {value!r}; give an integer of at least 1 and below 2^31")

"""Faults of a tile that is stored whole: one element before, or behind, an array that the backend may write."""

from __future__ import annotations

from typing import Any


def write_around(fault: str | None, array: Any) -> None:
    """Writes beside `array` with either fault, if it is a contiguous part of a larger one."""
    around = None if array is None else array.base
    if fault not in ("writes-before", "writes-behind") or around is None or around.ndim != 1:
        return
    first = (array.ctypes.data - around.ctypes.data) // array.itemsize
    around[first - 1 if fault == "writes-before" else first + array.size] = 1

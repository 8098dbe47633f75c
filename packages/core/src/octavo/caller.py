"""Finds the line of the user's program that called into Octavo, which a warning should name.

Between that line and ours are frames of the frameworks, and their number changes with the frameworks' versions.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from types import FrameType

# contextlib makes decorators of JAX's and torch's context managers.
_INNER = ("octavo", "octavo_registry", "octavo_torch", "octavo_jax", "torch", "jax", "flax", "contextlib", "functools")


@dataclass(frozen=True)
class Place:
    """A line of the caller's program."""

    file: str
    line: int


def place_of_caller() -> Place:
    """The innermost line outside of Octavo and the frameworks; `<unknown>:0` where there is none."""
    frame = next(filter(_is_users, _frames(sys._getframe(1))), None)
    return Place("<unknown>", 0) if frame is None else Place(frame.f_code.co_filename, frame.f_lineno)


def stacklevel_of_caller() -> int:
    """`warnings.warn(..., stacklevel=stacklevel_of_caller())` names the line of `place_of_caller`."""
    users = (_is_users(frame) for frame in _frames(sys._getframe(1)))
    return next((level for level, found in enumerate(users, 1) if found), 1)


def _frames(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _is_users(frame: FrameType) -> bool:
    if str(frame.f_globals.get("__name__")).partition(".")[0] in _INNER:
        return False
    # an __init__ that dataclasses wrote for a user's class is on no line of the program
    return (frame.f_code.co_filename, frame.f_code.co_name) != ("<string>", "__init__")

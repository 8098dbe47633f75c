"""Errors that the `octavo` command turns into one line: on stderr with an exit code, or among the notes."""

from __future__ import annotations

from octavo import OctavoError


class InputError(OctavoError, ValueError):
    """What the user gave cannot be used; exit code 2."""


class RunError(OctavoError, RuntimeError):
    """What the user asked for was tried and failed; exit code 1."""


class AbsentError(Exception):
    """A library cannot be timed here at all; its text names the library and says why, and stands in the notes once."""

"""Errors that the `octavo` command turns into one line on stderr and an exit code."""

from __future__ import annotations

from octavo import OctavoError


class InputError(OctavoError, ValueError):
    """What the user gave cannot be used; exit code 2."""


class RunError(OctavoError, RuntimeError):
    """What the user asked for was tried and failed; exit code 1."""

"""Errors that the `octavo` command turns into one line on stderr and an exit code."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from octavo import OctavoError

_READ = 1
"""The newest schema version of results that is known here."""


class InputError(OctavoError, ValueError):
    """What the user gave cannot be used; exit code 2."""


class RunError(OctavoError, RuntimeError):
    """What the user asked for was tried and failed; exit code 1."""


def check_version(named: str, content: Mapping[str, Any]) -> None:
    """InputError for a result that a newer octavo wrote, in which the same names may mean something else."""
    version = content.get("schema_version", _READ)
    if isinstance(version, int) and version > _READ:
        raise InputError(
            f"{named} has schema_version {version}, and this octavo reads {_READ}; upgrade octavo, or make it again"
        )

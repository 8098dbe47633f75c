"""Errors that every Octavo package raises."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic import ValidationError


class OctavoError(Exception):
    """Base of every error that Octavo defines."""


class RecipeError(OctavoError, ValueError):
    """A recipe or spec has an invalid value; the message names the field, the value and the fix."""


class NoBackendError(OctavoError, RuntimeError):
    """No installed backend serves a request.

    `decisions` holds one verdict per backend, in the order in which the backends were considered.
    """

    def __init__(self, message: str, decisions: Sequence[Any] = ()) -> None:
        super().__init__(message)
        self.decisions = tuple(decisions)


def explain_validation(model: str, error: ValidationError) -> str:
    """One line for each wrong field: `MXFP8.fprop: got 'x'; needs 'quantized' or 'high_precision'`."""
    lines = []
    for item in error.errors(include_url=False):
        field = ".".join([model, *(str(part) for part in item["loc"])])
        if item["type"] == "extra_forbidden":
            lines.append(f"{field}: there is no such field; remove it or check its spelling")
        elif item["type"] == "missing":
            lines.append(f"{field}: missing; give it a value")
        elif item["type"] == "value_error":
            lines.append(f"{field}: {item['ctx']['error']}")
        else:
            needed = item["msg"].removeprefix("Input should be ")
            lines.append(f"{field}: got {item['input']!r}; needs {needed}")
    return "\n".join(lines)

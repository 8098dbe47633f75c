"""Errors that every Octavo package raises."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, cast

from pydantic import ValidationError

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails


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


_LONGEST = 80
_MOST_FIELDS = 5
_FEW = 3
_COLLECTIONS = {"frozen_set_type": ("set", "{{{!r}}}"), "tuple_type": ("tuple", "({!r},)")}
"""pydantic's kinds of errors: what is needed, and what a text in its place was meant to be."""

N = TypeVar("N", bound=str)


def shown(value: object) -> str:
    """`repr(value)`, shortened where it is long: a message quotes what was given and stays readable."""
    text = repr(value[: _LONGEST + 1]) if isinstance(value, str | bytes) else repr(value)
    return text if len(text) <= _LONGEST else text[: _LONGEST - 3] + "..."


def one_of(argument: str, value: object, names: Sequence[N], error: type[ValueError] = ValueError) -> N:
    """`value`, if it is one of `names`; `error` quotes what `argument` was given and lists them otherwise."""
    if isinstance(value, str) and value in names:
        return cast(N, value)
    given = shown(value) if isinstance(value, str | int | float | None) else f"a {type(value).__name__}"
    *others, last = map(repr, names)
    needed = f"{', '.join(others)} or {last}" if len(names) <= _FEW else f"one of {', '.join(names)}"
    raise error(f"{argument} is {given}; give {needed}")


def printable(value: object) -> str:
    """`str(value)`, quoted if it has characters that would break a message's line, as names of files may."""
    text = str(value)
    return text if text.isprintable() else shown(text)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """`; did you mean mxfp8?` where a known name is spelled much like `name`, in any case; otherwise "".

    Where several known names begin with `name` and "-", such as "fp8-row" and "fp8-block" with "fp8", all of them are
    offered, but not their own longer variants.
    """
    by_lower = {each.lower(): each for each in known}
    wanted = name[:_LONGEST].lower()
    family = [each for each in by_lower if each.startswith(f"{wanted}-")]
    if family and wanted not in by_lower:
        close = [each for each in family if not any(each.startswith(f"{other}-") for other in family)]
    else:
        close = difflib.get_close_matches(wanted, by_lower, n=1)
    if not close:
        return ""
    *others, last = (by_lower[each] for each in close)
    return f"; did you mean {', '.join(others)} or {last}?" if others else f"; did you mean {last}?"


def _needed(item: ErrorDetails) -> str:
    """What a field needs, where a wrong value has been found."""
    kind, given, limits = item["type"], item["input"], item.get("ctx", {})
    if kind in _COLLECTIONS:
        name, example = _COLLECTIONS[kind]
        return f"a {name}, such as {example.format(given)}" if isinstance(given, str) else f"a {name}"
    if kind == "string_pattern_mismatch":
        return f"text that matches {limits['pattern']}"
    if kind == "too_short":
        return f"at least {limits['min_length']} of them"
    return item["msg"].removeprefix("Input should be ")


def explain_validation(model: str, error: ValidationError, fields: Iterable[str] = ()) -> str:
    """All wrong fields in one line: `MXFP8.fprop: got 'x'; needs 'quantized' or 'high_precision'`.

    fields  the names of the model's fields
    """
    known = tuple(fields)
    problems = []
    items = error.errors(include_url=False)
    for item in items[:_MOST_FIELDS]:
        name = ".".join(str(part) for part in item["loc"])
        shortened = name if len(name) <= _LONGEST else f"{name[: _LONGEST - 3]}..."
        field = f"{model}.{shortened}" if name else model  # without a name it is fields that contradict each other
        if item["type"] == "extra_forbidden":
            hint = did_you_mean(name, known) or f"; its fields are {', '.join(known)}"
            problems.append(f"{field}: there is no such field{hint}")
        elif item["type"] == "missing":
            problems.append(f"{field}: missing; give it a value")
        elif item["type"] == "value_error":
            problems.append(f"{field}: {item['ctx']['error']}")
        else:
            problems.append(f"{field}: got {shown(item['input'])}; needs {_needed(item)}")
    if len(items) > _MOST_FIELDS:
        problems.append(f"and {len(items) - _MOST_FIELDS} more")
    return "; ".join(problems)

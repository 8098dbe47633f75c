"""Arguments by their old names: the same call, one warning each, at the caller's line."""

from __future__ import annotations

import inspect
import pickle
import warnings
from dataclasses import dataclass, replace
from typing import Any

import pytest

from octavo.renamed import renamed_arguments, renamed_fields


@renamed_arguments(choices="k", normalize="renormalize")
def route(x: int, k: int, *, renormalize: bool = True) -> tuple[int, int, bool]:
    """Its arguments."""
    return x, k, renormalize


@renamed_fields(choices="k")
@dataclass(frozen=True)
class Shape:
    """Two sizes."""

    tokens: int
    k: int


OLD: Any = route
OLD_SHAPE: Any = Shape


def test_new_names_say_nothing() -> None:
    """By place and by name."""
    assert route(1, 2) == route(1, k=2) == (1, 2, True)
    assert route(1, 2, renormalize=False) == (1, 2, False)
    assert replace(Shape(1, 2), k=3) == Shape(tokens=1, k=3)
    assert pickle.loads(pickle.dumps(Shape(1, 2))) == Shape(1, 2)


def test_an_old_name_is_one_warning_at_the_callers_line() -> None:
    """Each old name; the result is that of the new ones."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        assert OLD(1, choices=2, normalize=False) == (1, 2, False)
        assert OLD_SHAPE(tokens=1, choices=2) == Shape(1, 2)
    assert [str(one.message).partition(";")[0] for one in said] == [
        "choices is called k now",
        "normalize is called renormalize now",
        "choices is called k now",
    ]
    assert {(one.category, one.filename) for one in said} == {(DeprecationWarning, __file__)}


def test_both_names_of_one_are_refused() -> None:
    """By name and by place."""
    for call in (
        lambda: OLD(1, k=2, choices=2),
        lambda: OLD(1, 2, choices=2),
        lambda: OLD_SHAPE(1, 2, choices=2),
        lambda: OLD_SHAPE(1, k=2, choices=2),
    ):
        with pytest.raises(TypeError, match="choices is called k now, and both were given; give k alone"):
            call()
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'k'"):
        OLD(1)


def test_readers_see_the_new_names() -> None:
    """Signatures, names and docstrings are the function's own."""
    assert [*inspect.signature(route).parameters] == ["x", "k", "renormalize"]
    assert [*inspect.signature(Shape).parameters] == ["tokens", "k"]
    assert (route.__name__, route.__doc__) == ("route", "Its arguments.")

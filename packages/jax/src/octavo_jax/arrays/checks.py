"""Checks of arguments that are no arrays, or may be none."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from octavo import QuantizerSpec

_NO_ARRAYS = (type(None), bool, int, float, complex, str, bytes, list, tuple, dict)
"""Not said as what arrays are: variables of frameworks, which stand for arrays, are of types of their own."""


def check_text(name: str, value: object) -> None:
    """ValueError for anything but text or None."""
    if value is not None and not isinstance(value, str):
        raise ValueError(f"{name} is {value!r}; give text, or None for no name")


def check_spec(spec: object) -> None:
    """ValueError for anything but a QuantizerSpec."""
    if not isinstance(spec, QuantizerSpec):
        given = repr(spec) if isinstance(spec, str) else f"a {type(spec).__name__}"
        raise ValueError(f"spec is {given}; give a QuantizerSpec, such as recipe.quantizer('x')")


def check_arrays(**values: object) -> None:
    """ValueError for None, numbers, text and containers in the place of arrays."""
    for name, value in values.items():
        if isinstance(value, _NO_ARRAYS):
            raise ValueError(f"{name} is a {type(value).__name__}; give an array")


def as_count(name: str, value: object) -> int:
    """`value`, an integer of Python's or numpy's, as the former; ValueError as `check_count`."""
    number = int(value) if isinstance(value, np.integer) else value
    check_count(name, number)
    assert isinstance(number, int)  # as checked
    return number


def check_count(name: str, value: object) -> None:
    """ValueError for anything but an integer from 1 to 2^31 - 1: a number of things that fit in memory."""
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value < 1 << 31:
        raise ValueError(f"{name} is {value!r}; give an integer of at least 1 and below 2^31")


def check_fixed(rows: object, what: str) -> None:
    """ValueError for a number of rows that is a symbol of `jax.export`; `what` has them."""
    if _is_symbol(rows):
        raise ValueError(
            f"{what} has {rows} rows, a symbolic size; kernels are planned for a number of them, so export each shape, "
            "or pad to one: rows past the sum of group_sizes cost nothing"
        )


def check_fixed_axes(what: str, shape: Iterable[object]) -> None:
    """ValueError for an axis of `what` whose size is a symbol of `jax.export`."""
    for size in shape:
        if _is_symbol(size):
            raise ValueError(
                f"{what} has an axis of {size}, a symbolic size; kernels are planned for numbers, so export each shape"
            )


def _is_symbol(size: object) -> bool:
    return not isinstance(size, int | np.integer)

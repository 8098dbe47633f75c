"""Axes and dtypes of the modules' arrays."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

from jax import Array
from jax.typing import DTypeLike

from octavo_jax.arithmetic.widening import in_dtype
from octavo_jax.functions.activations import check_activation
from octavo_registry.contract.cards import GATED, Activation


def cast(dtype: DTypeLike | None, *arrays: Array | None) -> tuple[Any, ...]:
    """The arrays in `dtype`; None leaves them as they are, and an absent array stays absent."""
    return tuple(a if a is None or dtype is None else in_dtype(a, dtype) for a in arrays)


def as_tuple(value: int | Sequence[int], name: str) -> tuple[int, ...]:
    """One integer or several as a tuple; ValueError for none."""
    try:
        values = (operator.index(value),) if isinstance(value, int) else tuple(operator.index(v) for v in value)
    except TypeError:
        raise ValueError(f"{name} is {value!r}; give an integer or a tuple of integers") from None
    if not values:
        raise ValueError(f"{name} is empty; give one or more")
    return values


def contracted_last(x: Array, axis: int | Sequence[int]) -> tuple[Array, tuple[int, ...]]:
    """(x with `axis` as its last axes, in x's order whatever order `axis` has, and their lengths).

    ValueError where an axis is out of range or named twice.
    """
    axes = as_tuple(axis, "axis")
    if any(not -x.ndim <= a < x.ndim for a in axes) or len({a % x.ndim for a in axes}) != len(axes):
        raise ValueError(f"axis is {axis!r} and x has shape {list(x.shape)}; name distinct axes of x")
    inner = tuple(sorted(a % x.ndim for a in axes))
    outer = tuple(a for a in range(x.ndim) if a not in inner)
    return x.transpose(outer + inner), tuple(x.shape[a] for a in inner)


def leading_dims(count: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """contracting_dims of x's last `count` axes with a kernel's first ones."""
    return tuple(range(-count, 0)), tuple(range(count))


def inner_columns(hidden: int, activation: Activation) -> int:
    """Columns of wi for `hidden` rows of wo: a gated activation takes a gate and an up projection."""
    return 2 * hidden if check_activation(activation) in GATED else hidden

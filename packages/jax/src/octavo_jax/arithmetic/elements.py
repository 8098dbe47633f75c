"""Elementwise arithmetic that is quick to trace: Python's operators as operations of lax.

An operator of a JAX array is a compiled function of jnp that promotes dtypes and broadcasts, and takes five times as
long to trace as lax's operation. A quantizer is some thousand of them. So functions of elements are marked as
`elementwise`: inside, their arrays are `Elements`, whose operators are lax's where the operands agree in dtype and
shape or one of them is a number, and jnp's elsewhere. Both compute the same.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import DTypeLike

P = ParamSpec("P")
R = TypeVar("R")
Operation = Callable[[Any, Any], Any]
Number = np.number[Any] | int


def plain(value: Any) -> Any:
    """The array of Elements, for what is not a function of elements; anything else as it is."""
    return value.array if isinstance(value, Elements) else value


def elements(value: Any) -> Any:
    """An array or a number as Elements."""
    return value if isinstance(value, Elements) else Elements(jnp.asarray(value))


def _as_partner(other: Any, array: Array) -> Any:
    """`other` as lax takes it beside `array`; None where jnp has to promote dtypes or to broadcast."""
    if array.weak_type:
        return None
    if isinstance(other, int | float) and not isinstance(other, bool | np.generic):
        kinds = "iuf" if isinstance(other, int) else "f"
        return array.dtype.type(other) if array.dtype.kind in kinds else None
    if getattr(other, "dtype", None) != array.dtype:
        return None
    if isinstance(other, np.generic):
        return other
    return other if other.shape == array.shape and not getattr(other, "weak_type", False) else None


def _applied(quick: Operation, general: Operation, left: Any, right: Any) -> Elements:
    left, right = plain(left), plain(right)
    if isinstance(left, jax.Array):
        first, second = left, _as_partner(right, left)
    else:
        first, second = _as_partner(left, right), right
    if first is None or second is None:
        return Elements(general(left, right))
    return Elements(quick(first, second))


def _operator(quick: Operation, general: Operation) -> Any:
    return lambda self, other: _applied(quick, general, self, other)


def _reflected(quick: Operation, general: Operation) -> Any:
    return lambda self, other: _applied(quick, general, other, self)


def _divided(x: Any, y: Any) -> Array:
    return lax.div(x, y) if jnp.issubdtype(x.dtype, jnp.floating) else jnp.true_divide(x, y)


def _shifted_right(x: Any, count: Any) -> Array:
    signed = np.issubdtype(x.dtype, np.signedinteger)
    return lax.shift_right_arithmetic(x, count) if signed else lax.shift_right_logical(x, count)


class Elements:
    """An array inside a function that is `elementwise`; jnp's functions take it, too."""

    __slots__ = ("array",)
    __array_ufunc__ = None  # numpy's scalars leave their operators to this class

    def __init__(self, array: Array) -> None:
        self.array = array

    def __jax_array__(self) -> Array:
        return self.array

    @property
    def dtype(self) -> np.dtype[Any]:
        """The array's."""
        return self.array.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """The array's."""
        return self.array.shape

    def astype(self, dtype: DTypeLike) -> Elements:
        """The values in another dtype."""
        return Elements(lax.convert_element_type(self.array, dtype))

    def view(self, dtype: DTypeLike) -> Elements:
        """The bits as another dtype of the same width."""
        return Elements(lax.bitcast_convert_type(self.array, dtype))

    def __invert__(self) -> Elements:
        return Elements(lax.bitwise_not(self.array))

    def __neg__(self) -> Elements:
        return Elements(lax.neg(self.array))

    __and__, __rand__ = _operator(lax.bitwise_and, jnp.bitwise_and), _reflected(lax.bitwise_and, jnp.bitwise_and)
    __or__, __ror__ = _operator(lax.bitwise_or, jnp.bitwise_or), _reflected(lax.bitwise_or, jnp.bitwise_or)
    __xor__, __rxor__ = _operator(lax.bitwise_xor, jnp.bitwise_xor), _reflected(lax.bitwise_xor, jnp.bitwise_xor)
    __add__, __radd__ = _operator(lax.add, jnp.add), _reflected(lax.add, jnp.add)
    __sub__, __rsub__ = _operator(lax.sub, jnp.subtract), _reflected(lax.sub, jnp.subtract)
    __mul__, __rmul__ = _operator(lax.mul, jnp.multiply), _reflected(lax.mul, jnp.multiply)
    __truediv__, __rtruediv__ = _operator(_divided, jnp.true_divide), _reflected(_divided, jnp.true_divide)
    __lshift__, __rlshift__ = _operator(lax.shift_left, jnp.left_shift), _reflected(lax.shift_left, jnp.left_shift)
    __rshift__, __rrshift__ = _operator(_shifted_right, jnp.right_shift), _reflected(_shifted_right, jnp.right_shift)
    __lt__, __gt__ = _operator(lax.lt, jnp.less), _operator(lax.gt, jnp.greater)
    __le__, __ge__ = _operator(lax.le, jnp.less_equal), _operator(lax.ge, jnp.greater_equal)
    __eq__, __ne__ = _operator(lax.eq, jnp.equal), _operator(lax.ne, jnp.not_equal)


def elementwise(function: Callable[P, R]) -> Callable[P, R]:
    """The function with its arrays as `Elements`; called with these it returns them, and arrays otherwise."""

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        inside = any(isinstance(argument, Elements) for argument in args)
        result = cast(Any, function)(*map(_wrapped, args), **{name: _wrapped(value) for name, value in kwargs.items()})
        return cast(R, result if inside else _unwrapped(result))

    return call


def _wrapped(value: Any) -> Any:
    return Elements(value) if isinstance(value, jax.Array) else value


def _unwrapped(result: Any) -> Any:
    if isinstance(result, tuple):
        parts = map(_unwrapped, result)
        return type(result)(*parts) if hasattr(result, "_fields") else tuple(parts)
    return plain(result)


def _as_case(value: Any, dtype: Any, shape: tuple[int, ...]) -> Any:
    """A case of `where` as lax takes it; None where jnp has to promote its dtype or to broadcast it."""
    if isinstance(value, jax.Array):
        return value if (value.dtype, value.shape, value.weak_type) == (dtype, shape, False) else None
    return lax.broadcast(dtype.type(value), shape) if isinstance(value, int) or value.dtype == dtype else None


def where(condition: Array, a: Number | Array, b: Number | Array) -> Array:
    """jnp.where of elements."""
    condition, a, b = plain(condition), plain(a), plain(b)
    cases = [getattr(case, "dtype", None) for case in (a, b)]
    dtype = cases[0] or cases[1]
    if dtype is not None and condition.size and jax.typeof(condition).sharding.mesh.empty:
        first, second = (_as_case(case, dtype, condition.shape) for case in (a, b))
        if first is not None and second is not None:
            return cast(Array, Elements(lax.select_n(condition, second, first)))
    return cast(Array, Elements(jnp.where(condition, a, b)))


def minimum(a: Array, b: Number | Array) -> Array:
    """jnp.minimum of elements."""
    return cast(Array, _applied(lax.min, jnp.minimum, a, b))


def maximum(a: Array, b: Number | Array) -> Array:
    """jnp.maximum of elements."""
    return cast(Array, _applied(lax.max, jnp.maximum, a, b))


def clip(x: Array, low: int, high: int) -> Array:
    """jnp.clip of integers."""
    return minimum(maximum(x, low), high)


def broadcast(a: Array, b: Array) -> tuple[Array, Array]:
    """jnp.broadcast_arrays of two."""
    if a.shape == b.shape:
        return a, b
    first, second = jnp.broadcast_arrays(plain(a), plain(b))
    return elements(first), elements(second)

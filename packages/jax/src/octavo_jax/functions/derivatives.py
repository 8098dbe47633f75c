"""Arrays through which no derivative is taken."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import jax
from jax import Array


def refusing_derivatives(message: str) -> Callable[[Array], Array]:
    """The identity of an array; TypeError with `message` where a derivative is taken through it.

    It is for code whose derivative JAX would get wrong without an error, such as roundings that are corrected, and for
    calls of kernels, where JAX's own error does not help.
    """

    @jax.custom_jvp
    def same(x: Array) -> Array:
        return x

    @same.defjvp
    def refused(*_: Any) -> NoReturn:
        raise TypeError(message)

    return same

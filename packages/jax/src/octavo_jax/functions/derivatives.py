"""Arrays through which no derivative is taken."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import jax
from jax import Array


def refusing_derivatives(message: str) -> Callable[[Array], Array]:
    """The identity of an array; TypeError with `message` where a derivative is taken through it.

    For what JAX would derive without an error and to less than its slope, such as roundings that are corrected, and for
    calls of kernels, of which its own error says nothing that helps.
    """

    @jax.custom_jvp
    def same(x: Array) -> Array:
        return x

    @same.defjvp
    def refused(*_: Any) -> NoReturn:
        raise TypeError(message)

    return same

"""Octavo's names of high-precision dtypes."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax.typing import DTypeLike

from octavo.formats import DType

DTYPES: dict[Any, DType] = {
    jnp.dtype(jnp.bfloat16): "bfloat16",
    jnp.dtype(jnp.float16): "float16",
    jnp.dtype(jnp.float32): "float32",
}
"""What an operand may have that holds no codes."""


def dtype_name(dtype: DTypeLike, argument: str) -> DType:
    """Octavo's name of a high-precision dtype; ValueError for any other, and for what is no dtype."""
    try:
        name = DTYPES.get(jnp.dtype(dtype))
    except TypeError:
        raise ValueError(f"{argument} is {dtype!r}; give bfloat16, float16 or float32") from None
    if name is None:
        raise ValueError(f"{argument} has dtype {jnp.dtype(dtype)}; it must be bfloat16, float16 or float32")
    return name


def element_type(preferred: DTypeLike | None, other: DTypeLike) -> jnp.dtype[Any]:
    """The dtype that `preferred_element_type` means, `other` for None; ValueError for one that holds no results."""
    if preferred is None:
        return jnp.dtype(other)
    return jnp.dtype(dtype_name(preferred, "preferred_element_type"))

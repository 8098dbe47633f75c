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
    """Octavo's name of a high-precision dtype; ValueError for any other."""
    name = DTYPES.get(jnp.dtype(dtype))
    if name is None:
        raise ValueError(f"{argument} has dtype {jnp.dtype(dtype)}; it must be bfloat16, float16 or float32")
    return name

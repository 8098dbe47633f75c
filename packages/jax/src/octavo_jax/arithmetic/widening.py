"""Arrays of a high-precision dtype in fp32, with the values to which they were rounded.

XLA may leave out a conversion of fp32 to bf16 or fp16 and the one back to fp32 that follows it, and does on GPUs
(`xla_allow_excess_precision`): within one program a reader would then see values as they were before they were rounded,
and other ones than where its operand is stored. Bits are not left out.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from octavo_jax.arithmetic import bits as fp32
from octavo_jax.arrays.numpy_arrays import as_jax


def in_fp32(x: Array) -> Array:
    """float32 x, exactly, whatever made it."""
    wide: Array = _by_bits(as_jax(x)) if x.dtype in (jnp.bfloat16, jnp.float16) else x.astype(jnp.float32)
    return wide


def in_dtype(x: Array, dtype: DTypeLike) -> Array:
    """x in `dtype`, as `astype` has it; `in_fp32` where that is float32."""
    return in_fp32(x) if jnp.dtype(dtype) == jnp.float32 else x.astype(dtype)


# bits have no derivative, and the second one of a layer in high precision goes through its products
@jax.custom_jvp
def _by_bits(x: Array) -> Array:
    return fp32.as_float(fp32.widened(x))


@_by_bits.defjvp
def _by_bits_jvp(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    return _by_bits(*primals), tangents[0].astype(jnp.float32)

"""Weights rounded to MXFP4's values, as octavo_numerics.round_mxfp4 defines them; in bits, whatever XLA flushes."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from octavo.quantizer import Direction
from octavo_jax.arithmetic import bits as fp32
from octavo_jax.arithmetic import casts, scales
from octavo_jax.arithmetic.quantize import along_columns, column_blocks
from octavo_jax.arithmetic.rows import RaggedRows, Rows, StackedRows

_BLOCK = 32


def rounded_bits(bits: Array, rows: Rows, direction: Direction) -> Array:
    """fp32 `bits` [M, K] or [G, N, K], zero in rows of no group, in blocks of 1x32 ("rowwise"), or of 32x1 that restart
    at each group, as bits of MXFP4's values."""
    magnitude = bits & fp32.MAGNITUDE
    if direction == "rowwise":
        of_blocks = scales.mxfp4(fp32.largest(column_blocks(magnitude, _BLOCK), -1))
        encode, stored = (along_columns(scale, _BLOCK, bits.shape[-1]) for scale in of_blocks)
    else:
        of_blocks = scales.mxfp4(fp32.largest(rows.panels(magnitude, _BLOCK), 1))
        encode, stored = (rows.from_blocks(scale, _BLOCK) for scale in of_blocks)
    code = casts.nearest(fp32.scaled_by_power(magnitude, encode), "e2m1") | ((bits >> 31) << casts.sign_shift("e2m1"))
    return casts.times(code, "e2m1", scales.e8m0_bits(stored))


@partial(jax.jit, static_argnames="direction")
def octavo_mxfp4_values(x: Array, sizes: Array | None, *, direction: Direction) -> Array:
    """bf16 `x` in MXFP4, which bf16 holds: [M, K] with sizes [G], or [G, N, K] with None."""
    rows: Rows = StackedRows(*x.shape[:2]) if sizes is None else RaggedRows(sizes, x.shape[0])
    bits = rounded_bits(rows.masked(fp32.widened(x)), rows, direction)
    # the lower halves are zeros
    return lax.bitcast_convert_type((bits >> np.uint32(16)).astype(jnp.uint16), jnp.bfloat16)

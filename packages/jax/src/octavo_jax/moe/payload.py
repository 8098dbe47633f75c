"""What travels between devices in place of high-precision rows: codes and scales of a recipe that scales row by row."""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp
from jax import Array, lax

from octavo import Recipe
from octavo.payload import payload_spec
from octavo.quantizer import Operand
from octavo_jax.arrays.grouped_tensor import GroupedTensor
from octavo_jax.dispatch.backends import BackendNames
from octavo_jax.quantizers.functional import dequantize, quantize


def move_with_payload(
    rows: Array,
    end: Array,
    move: Callable[[Array], Array],
    payload: Recipe | None,
    operand: Operand,
    backend: BackendNames,
) -> Array:
    """`move(rows)`; with a payload rows [M, K] travel as codes and scales, and come out dequantized in their dtype.

    end    int32 [1], rows that are read; others may hold anything
    move   takes an array with M rows to one whose rows come from several devices, bytes unchanged
    """
    if payload is None:
        return move(rows)
    spec = payload_spec(payload, operand)
    q = quantize(lax.stop_gradient(rows), spec, end, backend=backend)
    codes, scale, _ = q.plane("rowwise")
    # XLA's collectives do not carry every 8-bit float on every device; bytes they all do.
    codes = lax.bitcast_convert_type(move(lax.bitcast_convert_type(codes, jnp.uint8)), codes.dtype)
    scale = move(scale)
    count = len(codes)
    received = GroupedTensor(
        q.spec.model_copy(update={"shape": (count, rows.shape[1])}),
        jnp.full((1,), count, jnp.int32),
        codes,
        scale,
    )
    return dequantize(received, preferred_element_type=rows.dtype, backend=backend)

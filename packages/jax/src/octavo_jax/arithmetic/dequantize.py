"""Codes and scales back to fp32 values, exact to the bit."""

from __future__ import annotations

import math

import jax.numpy as jnp
from jax import Array

from octavo.quantizer import Direction
from octavo_jax.arithmetic import bits as fp32
from octavo_jax.arithmetic import casts
from octavo_jax.arithmetic.rows import RaggedRows, Rows, StackedRows
from octavo_jax.arithmetic.scales import e8m0_bits
from octavo_jax.arrays.grouped_tensor import GroupedTensor


def rows_of(q: GroupedTensor) -> Rows:
    """How the rows of q fall into groups."""
    if q.group_sizes is None:
        groups, rows, _ = q.spec.shape
        return StackedRows(groups, rows)
    return RaggedRows(q.group_sizes, q.spec.shape[0])


def padded_sizes(group_sizes: Array, rows: int, size: int) -> Array:
    """Rows of each group after padding it to a multiple of `size`, clamped like the sizes themselves."""
    ragged = RaggedRows(group_sizes, rows)
    return (ragged.sizes + (size - 1)) // size * size


def _scale_bits(q: GroupedTensor, scale: Array, second: Array | None, rows: Rows, direction: Direction) -> Array:
    """fp32 bits of the decode scales in their stored shape, the second level multiplied in."""
    spec = q.spec.quantizer
    if spec.scale_format == "fp32":
        return fp32.as_bits(scale)
    if spec.scale_format == "e8m0":
        return e8m0_bits(scale)
    if second is None:
        raise ValueError(f"{direction}_global is missing; NVFP4 data need the second-level factor of each group, [G]")
    factor = fp32.as_bits(second)
    if q.group_sizes is None:
        spread = factor.reshape(-1, 1, 1)
    elif direction == "rowwise" and not spec.square:
        spread = rows.from_groups(factor)[..., None]
    else:
        spread = rows.blocks_from_groups(factor, spec.block_size or 1)[:, None]
    return casts.times(casts.codes(scale), "e4m3", spread)


def _spread(q: GroupedTensor, scale: Array, rows: Rows, direction: Direction) -> Array:
    """Stored scales [...] to an array that broadcasts against the payload's logical shape."""
    spec = q.spec.quantizer
    columns = q.spec.shape[-1]
    size = spec.block_size
    if spec.scaling in ("delayed", "current"):
        return rows.from_groups(scale)[..., None]
    if size is None:
        return scale[..., None] if direction == "rowwise" else rows.from_groups(scale)
    by_rows = direction == "columnwise" or spec.square
    if by_rows:
        flat = scale.reshape(math.prod(scale.shape[:-1]), scale.shape[-1])
        scale = jnp.repeat(flat, size, axis=0) if _padded(q, direction) else rows.from_blocks(flat, size)
    if direction == "rowwise" or spec.square_in(direction):
        scale = jnp.repeat(scale, size, axis=-1)[..., :columns]
    return scale


def _padded(q: GroupedTensor, direction: Direction) -> bool:
    return direction == "columnwise" and q.spec.row_alignment > 1


def decode_scales(q: GroupedTensor, direction: Direction) -> Array:
    """fp32 bits of one plane's decode scales, in a shape that broadcasts against its payload."""
    _, scale, second = q.plane(direction)
    rows = rows_of(q)
    return _spread(q, _scale_bits(q, scale, second, rows, direction), rows, direction)


def dequantize(q: GroupedTensor, direction: Direction = "rowwise") -> Array:
    """fp32 values of one plane: [M, K] or [G, N, K]; rows past the sum are +0.

    Hadamard column data stay in the Hadamard domain and in their padded layout [block_bound(M, G, 16) * 16, K].
    """
    payload, scale, second = q.plane(direction)
    layout = q.spec.rowwise_layout if direction == "rowwise" else q.spec.columnwise_layout
    if layout != "plain":
        raise ValueError(f"the {direction} layout is {layout!r}; jax-reference reads 'plain', so undo it first")
    rows = rows_of(q)
    bits = _scale_bits(q, scale, second, rows, direction)
    code = casts.codes(payload)
    values = casts.times(code, q.spec.quantizer.format, _spread(q, bits, rows, direction))
    if _padded(q, direction) and q.group_sizes is not None:
        size = q.spec.row_alignment
        inside = RaggedRows(padded_sizes(q.group_sizes, q.spec.shape[0], size), payload.shape[0])
        return fp32.as_float(inside.masked(values))
    return fp32.as_float(rows.masked(values))

"""What a quantizer does to an operand, counted on its device: octavo_numerics.tensor_stats, in float32."""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from octavo import GroupedTensorSpec, QuantizerSpec
from octavo.formats import PAST_LARGEST
from octavo.health import COLUMN_WINDOWS, WINDOW
from octavo.quantizer import HADAMARD_SIZE, Direction
from octavo_jax.arithmetic import bits as fp32
from octavo_jax.arithmetic.dequantize import decode_scales, dequantize
from octavo_jax.arithmetic.hadamard import transform
from octavo_jax.arithmetic.mxfp4 import rounded_bits
from octavo_jax.arithmetic.quantize import OPERAND_NUMBER, WHOLE, Random, Span, group_amax, quantize_plane
from octavo_jax.arithmetic.rows import RaggedRows, Rows, StackedRows
from octavo_jax.arithmetic.widening import in_fp32
from octavo_jax.arrays.grouped_tensor import GroupedTensor


class _Sampled(Span):
    """Some rows of an operand, whose groups' amaxes are known: magnitude bits [G] in the place of `rows`."""

    def of_group(self, amax: Array) -> Array:
        """The known amaxes."""
        known: Array = self.rows  # type: ignore[assignment]
        return known


class Sample(NamedTuple):
    """What is quantized: rows with their sizes, or matrices with None; which of the rows are real."""

    x: Array
    sizes: Array | None
    real: Array
    span: Span


def operand_stats(
    x: Array,
    sizes: Array | None,
    spec: QuantizerSpec | None,
    direction: Direction,
    seed: Array | None,
    scale: Array | None,
    rows: int,
) -> Array:
    """float32 [8, G]: FIELDS of each group of `x`, [M, K] with sizes [G], or [G, N, K] with None.

    spec    None: an operand that stays in high precision, of which elements, amax and non_finite alone are counted
    rows    of each group: a multiple of WINDOW, of evenly spaced windows; 0: all. Of a sample's rows COLUMN_WINDOWS
            windows of columns count. The amax is of all rows and columns in any case. Scales of whole columns, and
            Hadamard data, need all rows, and scales of whole rows need all columns
    """
    every = _rows_of(x, sizes)
    amax = group_amax(every.masked(fp32.widened(x)) & fp32.MAGNITUDE, every)
    transformed = spec is not None and spec.hadamard and direction == "columnwise"
    spans_columns = spec is not None and spec.scaling == "row" and direction == "columnwise"
    if rows and not (transformed or spans_columns):
        sample = _sampled(x, every, rows, amax, every_column=spec is not None and spec.scaling == "row")
    else:
        real = every.valid if isinstance(every, RaggedRows) else jnp.ones(x.shape[:2], bool)
        sample = Sample(x, sizes, real, WHOLE)
    columns = sample.x.shape[-1]
    source = _rows(in_fp32(sample.x))
    real = sample.real.reshape(-1)
    group = _group_of_rows(sample, every.groups)

    def summed(of_rows: Array) -> Array:
        return jax.ops.segment_sum(of_rows.astype(jnp.float32), group, every.groups + 1)[:-1]

    def counted(mask: Array) -> Array:
        return summed(jnp.sum(mask & real[:, None], axis=1, dtype=jnp.int32))

    if spec is None:
        elements = summed(jnp.where(real, columns, 0))
        zero = jnp.zeros_like(elements)
        return jnp.stack([elements, fp32.as_float(amax), counted(~_is_finite(source)), *[zero] * 5])
    wanted = None
    if spec.mxfp4 is not None:
        rows_of = _rows_of(sample.x, sample.sizes)
        wanted = fp32.as_float(rounded_bits(rows_of.masked(fp32.widened(sample.x)), rows_of, spec.mxfp4))
        sample = sample._replace(x=wanted)
    q = _quantized(sample, spec, direction, seed, scale)
    decoded = _rows(dequantize(q, direction))
    if transformed:
        ragged = RaggedRows(sizes, x.shape[0]) if sizes is not None else StackedRows(*x.shape[:2])
        panels = transform(ragged.panels(ragged.masked(fp32.widened(x)), HADAMARD_SIZE))
        source = _rows(fp32.as_float(panels))
        of_block = ragged.block_group(HADAMARD_SIZE) if isinstance(ragged, RaggedRows) else None
        assert of_block is not None  # matrices have no Hadamard data
        group = jnp.repeat(of_block, HADAMARD_SIZE)
        real = group < every.groups
        bits = jnp.where(real[:, None], fp32.as_bits(source) & fp32.MAGNITUDE, 0)
        amax = jnp.zeros(every.groups + 1, jnp.uint32).at[group].max(fp32.largest(bits, -1))[:-1]
    finite, readable = _is_finite(source), _is_finite(decoded)
    comparable = finite & readable & real[:, None]
    wide = jnp.where(comparable, source, 0)
    error = jnp.where(comparable, decoded, 0) - wide
    saturated = finite & _past_largest(q, source, spec, direction, scale, group)
    if spec.scaling != "delayed":
        saturated &= readable  # scales of a unit that is not finite are NaN, and nothing is cut
    return jnp.stack(
        [
            summed(jnp.where(real, columns, 0)),
            fp32.as_float(amax),
            counted(~readable),
            counted(saturated),
            counted(comparable & ~_is_zero(source) & _is_zero(decoded)),
            summed(jnp.sum(wide * wide, axis=1)),
            summed(jnp.sum(error * error, axis=1)),
            counted(comparable & _differ(decoded, wanted)),
        ]
    )


def _rows(x: Array) -> Array:
    """[..., K] as rows; K may be 0."""
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


# XLA's comparisons flush subnormals, so these compare bits. Of finite floats whose bits are not zero LLVM makes one
# comparison of floats, so `jnp.isfinite` is no part of it either.


def _is_finite(values: Array) -> Array:
    finite: Array = fp32.is_finite(fp32.as_bits(values) & fp32.MAGNITUDE)
    return finite


def _is_zero(values: Array) -> Array:
    return fp32.as_bits(values) & fp32.MAGNITUDE == 0


def _differ(decoded: Array, wanted: Array | None) -> Array:
    """Where the codes' values are not those that they were to hold, zeros of both signs being one."""
    if wanted is None:
        return jnp.zeros(decoded.shape, bool)
    wanted = _rows(wanted)
    return (fp32.as_bits(decoded) != fp32.as_bits(wanted)) & ~(_is_zero(decoded) & _is_zero(wanted))


def _rows_of(x: Array, sizes: Array | None) -> Rows:
    return StackedRows(*x.shape[:2]) if sizes is None else RaggedRows(sizes, x.shape[0])


def _group_of_rows(sample: Sample, groups: int) -> Array:
    """The group of each row; `groups` for rows of none."""
    if sample.sizes is None:
        return jnp.repeat(jnp.arange(groups), sample.x.shape[1])
    return RaggedRows(sample.sizes, sample.x.shape[0]).row_group


def _sampled(x: Array, every: Rows, rows: int, amax: Array, *, every_column: bool) -> Sample:
    """`rows` rows of each group and COLUMN_WINDOWS windows of columns, as matrices, both spread evenly over it."""
    if isinstance(every, RaggedRows):
        sizes, starts, flat = every.sizes, every.starts, x
    else:
        sizes = jnp.full((every.groups,), x.shape[1], jnp.int32)
        starts, flat = jnp.arange(every.groups, dtype=jnp.int32) * x.shape[1], _rows(x)
    windows = max(min(rows, flat.shape[0] + WINDOW - 1) // WINDOW, 1)
    number = (sizes + (WINDOW - 1)) // WINDOW
    turn = jnp.arange(windows, dtype=jnp.int32)
    # a group of fewer windows gives each of them once
    window = jnp.where(number[:, None] > windows, turn * number[:, None] // windows, turn)
    place = (window[:, :, None] * WINDOW + jnp.arange(WINDOW, dtype=jnp.int32)).reshape(every.groups, -1)
    real = place < sizes[:, None]
    if flat.shape[0] == 0:
        return Sample(jnp.zeros((*place.shape, x.shape[-1]), x.dtype), None, real, WHOLE)
    chosen = flat[jnp.where(real, starts[:, None] + place, 0)]
    across = -(-x.shape[-1] // WINDOW)
    if not every_column and across > COLUMN_WINDOWS:  # the last window, which may be narrower, is never one of these
        first = np.arange(COLUMN_WINDOWS) * across // COLUMN_WINDOWS * WINDOW
        chosen = chosen[:, :, (first[:, None] + np.arange(WINDOW)).reshape(-1)]
    values = jnp.where(real[:, :, None], chosen, jnp.zeros((), x.dtype))
    return Sample(values, None, real, _Sampled((), amax))  # type: ignore[arg-type]


def _quantized(
    sample: Sample, spec: QuantizerSpec, direction: Direction, seed: Array | None, scale: Array | None
) -> GroupedTensor:
    """One direction's codes and scales, in the plain layout."""
    x, sizes = sample.x, sample.sizes
    groups = x.shape[0] if sizes is None else sizes.shape[0]
    random = None
    if spec.stochastic and seed is not None:
        random = Random(seed, OPERAND_NUMBER[spec.role], np.uint32(0))
    plane = quantize_plane(x, _rows_of(x, sizes), spec, direction, scale=scale, random=random, span=sample.span)
    if sizes is None and spec.hadamard:
        # matrices have no Hadamard data; a sample has row data alone, which are not transformed
        spec = QuantizerSpec(**{**dict(spec), "hadamard": False})
    layout = GroupedTensorSpec(shape=x.shape, groups=groups, quantizer=spec, ragged_axis=None if sizes is None else 0)
    if direction == "rowwise":
        return GroupedTensor(layout, sizes, plane.payload, plane.scale, plane.second_level)
    return GroupedTensor(layout, sizes, None, None, None, plane.payload, plane.scale, plane.second_level)


def _past_largest(
    q: GroupedTensor, source: Array, spec: QuantizerSpec, direction: Direction, scale: Array | None, group: Array
) -> Array:
    """Where |x| times its encode scale lies half a unit or more past the format's largest value.

    Scales made from an amax leave nothing there, but for NVFP4's, whose block scales are rounded to E4M3.
    """
    if spec.scaling == "delayed":
        assert scale is not None  # the front end has checked it
        encode = scale[jnp.minimum(group, scale.shape[0] - 1)][:, None]
        return jnp.abs(source * encode) > PAST_LARGEST[spec.format]
    if spec.scaling != "nvfp4":
        return jnp.zeros(source.shape, bool)
    decode = jnp.broadcast_to(decode_scales(q, direction), q.plane(direction)[0].shape)
    encode = jnp.minimum(fp32.divide(fp32.ONE, decode), fp32.LARGEST).reshape(source.shape)
    product = fp32.scaled(fp32.as_bits(source) & fp32.MAGNITUDE, encode)
    return product > fp32.constant(PAST_LARGEST[spec.format])

"""Quantize an operand: amax of each scaling unit, scales, codes. One function makes one plane."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from octavo import QuantizerSpec
from octavo.quantizer import HADAMARD_SIZE, Direction, Operand
from octavo_jax.arithmetic import bits as fp32
from octavo_jax.arithmetic import casts, philox, scales
from octavo_jax.arithmetic.elements import elementwise, where
from octavo_jax.arithmetic.hadamard import transform
from octavo_jax.arithmetic.rows import Rows
from octavo_jax.arithmetic.scales import Scales

OPERAND_NUMBER: dict[Operand, int] = {"x": 0, "w": 1, "dy": 2}
"""The operand's number in Philox's counter."""

_REDUCTION_ROWS = 32
"""Rows that are reduced together on the way to a maximum over a whole group."""


class Plane(NamedTuple):
    """Payload, decode scales, and NVFP4's second-level decode factor or None, in the plain layout."""

    payload: Array
    scale: Array
    second_level: Array | None


class Span(NamedTuple):
    """Mesh axes along which the operand is one shard of a larger one: of its columns, and of its rows."""

    columns: tuple[str, ...] = ()
    rows: tuple[str, ...] = ()

    def along_row(self, amax: Array) -> Array:
        """Amaxes of rows' shards as those of the rows; magnitude bits."""
        return _largest_of(amax, self.columns)

    def along_column(self, amax: Array) -> Array:
        """Amaxes of columns' shards as those of the columns."""
        return _largest_of(amax, self.rows)

    def of_group(self, amax: Array) -> Array:
        """Amaxes of groups' shards as those of the groups."""
        return _largest_of(amax, self.columns + self.rows)

    def first_column(self, columns: int) -> Array | np.uint32:
        """The number of the first column in the whole operand, of which each shard has `columns`."""
        if not self.columns:
            return np.uint32(0)
        return lax.axis_index(self.columns).astype(jnp.uint32) * np.uint32(columns)


WHOLE = Span()
"""An operand that is no shard."""


def _largest_of(amax: Array, axes: tuple[str, ...]) -> Array:
    return lax.pmax(amax, axes) if axes else amax  # type: ignore[no-untyped-call]


class Random(NamedTuple):
    """What stochastic rounding is keyed by: seed words uint32 [2], and the numbers of the operand, of the first group
    and of the first column."""

    key: Array
    operand: int
    group_offset: Array | np.uint32
    first_column: Array | np.uint32 = np.uint32(0)

    def row_data(self, rows: Rows, column_blocks: int) -> Array:
        """16 bits for each element of [*lead, column_blocks * 16]."""
        group, row = rows.position
        group, row = jnp.broadcast_arrays(group, row)
        block = jnp.arange(column_blocks, dtype=jnp.uint32) + self.first_column // HADAMARD_SIZE
        outer = row[..., None].astype(jnp.uint32)
        sixteen = philox.block_bits(self.key, outer, block, 0, self.operand, self._group(group)[..., None])
        return jnp.moveaxis(sixteen, 0, -1).reshape(*row.shape, column_blocks * HADAMARD_SIZE)

    def column_data(self, rows: Rows, columns: int) -> Array:
        """16 bits for each element of the panels [P, 16, columns]."""
        group, block = rows.block_position(HADAMARD_SIZE)
        outer = jnp.arange(columns, dtype=jnp.uint32) + self.first_column
        within = block[:, None].astype(jnp.uint32)
        sixteen = philox.block_bits(self.key, outer, within, 1, self.operand, self._group(group)[:, None])
        return jnp.moveaxis(sixteen, 0, 1)

    def _group(self, group: Array) -> Array:
        return group.astype(jnp.uint32) + self.group_offset


@elementwise
def _codes(bits: Array, encode: Array, spec: QuantizerSpec, random: Array | None) -> Array:
    """Payload of fp32 `bits` under encode scales that broadcast against them."""
    magnitude = bits & fp32.MAGNITUDE
    powers = spec.scaling == "mxfp8" or (spec.power_of_two and spec.scaling != "delayed")
    product = (fp32.scaled_by_power if powers else fp32.scaled)(magnitude, encode)
    code = casts.nearest(product, spec.format) if random is None else casts.stochastic(product, random)
    code = code | ((bits >> 31) << casts.sign_shift(spec.format))
    invalid = ~fp32.is_finite(magnitude) | (encode > fp32.INFINITY)
    return casts.stored(where(invalid, np.uint32(casts.NAN_CODE[spec.format]), code), spec.format)


def column_blocks(values: Array, size: int) -> Array:
    """[..., K] as [..., ceil(K / size), size], zero-padded."""
    columns = values.shape[-1]
    count = -(-columns // size)
    padded = jnp.pad(values, [(0, 0)] * (values.ndim - 1) + [(0, count * size - columns)])
    return padded.reshape(*values.shape[:-1], count, size)


def along_columns(per_block: Array, size: int, columns: int) -> Array:
    """[..., ceil(K / size)] to [..., K]."""
    return jnp.repeat(per_block, size, axis=-1)[..., :columns]


def group_amax(magnitude: Array, rows: Rows) -> Array:
    """[G] magnitude bits of each group's largest element; rows of no group must be zero."""
    row_amax = fp32.largest(magnitude, -1)[..., None]
    return rows.group_largest(fp32.largest(rows.panels(row_amax, _REDUCTION_ROWS), (1, 2)), _REDUCTION_ROWS)


def _fp32_scales(amax: Array, spec: QuantizerSpec) -> Scales:
    return scales.e8m0(amax, spec.format) if spec.scaling == "mxfp8" else scales.from_amax(amax, spec)


def _two_levels(amax: Array, of_groups: Array, spread: Callable[[Array], Array]) -> tuple[Scales, Array]:
    """NVFP4's block scales, and the second level's decode factors of the groups, [G].

    of_groups   amaxes of the groups, [G]
    spread      an array [G] to one that broadcasts against `amax`
    """
    group = scales.second_level(of_groups)
    return scales.nvfp4(amax, spread(group.encode), spread(fp32.as_bits(group.stored))), group.stored


def _per_group(bits: Array, rows: Rows, spec: QuantizerSpec, scale: Array | None, span: Span) -> Plane:
    if spec.scaling == "delayed":
        if scale is None:
            raise ValueError("scale is None and the scaling is 'delayed'; give the encode scale of each group, [G]")
        unit_scales = scales.from_history(scale)
    else:
        unit_scales = scales.from_amax(span.of_group(group_amax(bits & fp32.MAGNITUDE, rows)), spec)
    return Plane(_codes(bits, rows.from_groups(unit_scales.encode)[..., None], spec, None), unit_scales.stored, None)


def _row_scaled(bits: Array, rows: Rows, spec: QuantizerSpec, direction: Direction, span: Span) -> Plane:
    magnitude = bits & fp32.MAGNITUDE
    if direction == "rowwise":
        unit_scales = scales.from_amax(span.along_row(fp32.largest(magnitude, -1)), spec)
        return Plane(_codes(bits, unit_scales.encode[..., None], spec, None), unit_scales.stored, None)
    panels = rows.panels(magnitude, _REDUCTION_ROWS)
    unit_scales = scales.from_amax(
        span.along_column(rows.group_largest(fp32.largest(panels, 1), _REDUCTION_ROWS)), spec
    )
    return Plane(_codes(bits, rows.from_groups(unit_scales.encode), spec, None), unit_scales.stored, None)


def _row_blocks(bits: Array, rows: Rows, spec: QuantizerSpec, size: int, random: Random | None, span: Span) -> Plane:
    columns = bits.shape[-1]
    magnitude = bits & fp32.MAGNITUDE
    amax = fp32.largest(column_blocks(magnitude, size), -1)
    second = None
    if spec.scaling == "nvfp4":
        of_groups = span.of_group(group_amax(magnitude, rows))
        unit_scales, second = _two_levels(amax, of_groups, lambda factor: rows.from_groups(factor)[..., None])
    else:
        unit_scales = _fp32_scales(amax, spec)
    drawn = None if random is None else random.row_data(rows, amax.shape[-1])[..., :columns]
    return Plane(
        _codes(bits, along_columns(unit_scales.encode, size, columns), spec, drawn), unit_scales.stored, second
    )


def _square_blocks(bits: Array, rows: Rows, spec: QuantizerSpec, size: int, random: Random | None, span: Span) -> Plane:
    columns = bits.shape[-1]
    magnitude = bits & fp32.MAGNITUDE
    row_part = fp32.largest(column_blocks(magnitude, size), -1)
    amax = fp32.largest(rows.panels(row_part, size), 1)
    second = None
    if spec.scaling == "nvfp4":
        of_groups = span.of_group(group_amax(magnitude, rows))
        unit_scales, second = _two_levels(
            amax, of_groups, lambda factor: rows.blocks_from_groups(factor, size)[:, None]
        )
    else:
        unit_scales = _fp32_scales(amax, spec)
    encode = along_columns(rows.from_blocks(unit_scales.encode, size), size, columns)
    drawn = None if random is None else random.row_data(rows, amax.shape[-1])[..., :columns]
    return Plane(_codes(bits, encode, spec, drawn), rows.block_scales(unit_scales.stored), second)


def _column_plane(bits: Array, rows: Rows, spec: QuantizerSpec, size: int, random: Random | None, span: Span) -> Plane:
    """Blocks of `size` rows. Hadamard data are transformed block by block and stay in the padded layout."""
    panels = rows.panels(bits, size)
    if spec.hadamard:
        panels = transform(panels)
    amax = fp32.largest(panels & fp32.MAGNITUDE, 1)
    second = None
    if spec.scaling == "nvfp4":
        of_groups = span.of_group(rows.group_largest(fp32.largest(amax, -1), size))
        unit_scales, second = _two_levels(
            amax, of_groups, lambda factor: rows.blocks_from_groups(factor, size)[:, None]
        )
    else:
        unit_scales = _fp32_scales(amax, spec)
    drawn = None if random is None else random.column_data(rows, bits.shape[-1])
    stored = rows.block_scales(unit_scales.stored)
    if spec.hadamard:
        payload = _codes(panels, unit_scales.encode[:, None], spec, drawn)
        return Plane(payload.reshape(panels.shape[0] * size, bits.shape[-1]), stored, second)
    drawn = None if drawn is None else rows.unpanel(drawn, size)
    return Plane(_codes(bits, rows.from_blocks(unit_scales.encode, size), spec, drawn), stored, second)


def quantize_plane(
    x: Array,
    rows: Rows,
    spec: QuantizerSpec,
    direction: Direction,
    *,
    scale: Array | None,
    random: Random | None,
    span: Span = WHOLE,
) -> Plane:
    """One plane of x, [M, K] or [G, N, K].

    scale    encode scales [G] of delayed scaling; other scalings ignore it
    random   of stochastic rounding; None rounds to nearest
    span     where x is one shard, whose scales are those of the whole; blocks lie within shards
    """
    bits = rows.masked(fp32.widened(x))
    size = spec.block_size
    if spec.scaling in ("delayed", "current"):
        return _per_group(bits, rows, spec, scale, span)
    if size is None:
        return _row_scaled(bits, rows, spec, direction, span)
    if spec.square_in(direction):
        return _square_blocks(bits, rows, spec, size, random, span)
    make = _row_blocks if direction == "rowwise" else _column_plane
    return make(bits, rows, spec, size, random, span)

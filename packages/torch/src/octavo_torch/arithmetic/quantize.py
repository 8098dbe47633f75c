"""Quantize and dequantize one operand: every scaling, both directions, ragged or stacked.

A scale covers a unit: a segment of rows (each row, a block, a group) times a segment of columns (each column, a block,
all). So one path serves every scaling: amax of the units, scales from amax, scales spread back over the elements, cast.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from octavo import GroupedTensorSpec, QuantizerSpec
from octavo.quantizer import HADAMARD_SIZE, Direction
from octavo_torch.arithmetic.casts import ABS_BITS, bits_of, canonical_nan, e8m0_to_float, from_codes, to_e2m1, to_fp8
from octavo_torch.arithmetic.groups import RowGroups, segment_amax
from octavo_torch.arithmetic.hadamard import hadamard_rows
from octavo_torch.arithmetic.philox import block_draws
from octavo_torch.arithmetic.scales import decode_scale, e8m0_scales, fp32_scales, nvfp4_scales, poisoned_by
from octavo_torch.arrays.grouped_tensor import GroupedTensor

OPERAND_NUMBER = {"x": 0, "w": 1, "dy": 2}


@dataclass(frozen=True)
class Units:
    """Which elements share a scale. rows: "each", "group" or a block size; columns: "each", "all" or a block size."""

    rows: Literal["each", "group"] | int
    columns: Literal["each", "all"] | int


PER_GROUP = Units("group", "all")


@dataclass(frozen=True)
class Noise:
    """Where the random bits of stochastic rounding come from: see philox.block_draws."""

    seed: Tensor
    operand: int
    group_offset: int


@dataclass(frozen=True)
class Plane:
    """One direction's codes [rows, K], decode scales, NVFP4's second-level factor [G], and values before the cast."""

    codes: Tensor
    scale: Tensor
    factor: Tensor | None
    scaled: Tensor


def units_of(spec: QuantizerSpec, direction: Direction) -> Units:
    """The units of one direction, as the table in GroupedTensorSpec lays them out."""
    size = spec.block_size
    if spec.scaling in ("delayed", "current"):
        return PER_GROUP
    if size is None:
        return Units("each", "all") if direction == "rowwise" else Units("group", "each")
    if spec.square_in(direction):
        return Units(size, size)
    return Units("each", size) if direction == "rowwise" else Units(size, "each")


def quantize_reference(
    x: Tensor,
    layout: GroupedTensorSpec,
    sizes: Tensor | None,
    *,
    seed: Tensor | None,
    operand: str,
    group_offset: int,
    scale: Tensor | None,
) -> GroupedTensor:
    """`x` in the planes that `layout` asks for.

    x       [M, K] with bounded int64 `sizes` [G] on its device, or [G, N, K] with sizes None
    seed    0-dimensional int64 tensor for stochastic rounding
    scale   fp32 [G], the encode scales of delayed scaling
    """
    spec = layout.quantizer
    if sizes is None:
        groups = RowGroups.stacked(layout.groups, layout.shape[1], x.device)
        flat = x.reshape(groups.rows, layout.shape[2]).to(torch.float32)
    else:
        groups = RowGroups(sizes, layout.shape[0])
        flat = torch.where(groups.valid[:, None], x.to(torch.float32), 0.0)
    noise = Noise(seed, OPERAND_NUMBER[operand], group_offset) if seed is not None and spec.stochastic else None
    result = GroupedTensor(layout, sizes)
    if spec.shares_codes:
        plane = quantize_plane(flat, groups, spec, "rowwise", noise, scale)
        shared = (
            plane.codes.view(layout.payload_shape("rowwise")),
            _trimmed(plane.scale, layout.scale_shape("rowwise")),
            plane.factor,
        )
        for direction in spec.directions:
            _store(result, direction, *shared)
        return result
    for direction in spec.directions:
        rows, row_groups = flat, groups
        if direction == "columnwise" and spec.hadamard:
            rows, row_groups = hadamard_rows(padded_rows(flat, groups)), groups.padded(HADAMARD_SIZE)
        plane = quantize_plane(rows, row_groups, spec, direction, noise, scale)
        codes = plane.codes.view(layout.payload_shape(direction))
        _store(result, direction, codes, _trimmed(plane.scale, layout.scale_shape(direction)), plane.factor)
        del plane
    return result


def _store(result: GroupedTensor, direction: Direction, codes: Tensor, scale: Tensor, factor: Tensor | None) -> None:
    setattr(result, direction, codes)
    setattr(result, f"{direction}_scale", scale)
    setattr(result, f"{direction}_global", factor)


def _trimmed(scale: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Unit scales [S, C] in the plain layout's shape; stacked matrices leave spare blocks at the end."""
    count = 1
    for size in shape:
        count *= size
    # a result of its own: as a view it would keep the scales of blocks that are not there
    return scale.reshape(scale.numel())[:count].clone().view(shape)


def padded_rows(x: Tensor, groups: RowGroups) -> Tensor:
    """[M, K] to [block_bound(M, G, 16) * 16, K]: each group zero-padded to a multiple of 16 rows."""
    rows, real, _ = groups.panels(HADAMARD_SIZE)
    if not groups.rows:
        return x.new_zeros((rows.numel(), x.shape[1]))
    return x.index_select(0, rows.reshape(-1)).masked_fill_(~real.reshape(-1, 1), 0.0)


def unit_amax(x: Tensor, groups: RowGroups, units: Units) -> Tensor:
    """int32 bit patterns of each unit's amax, [row segments, column segments]."""
    bits = bits_of(x) & ABS_BITS
    if units.columns == "all":
        bits = bits.amax(1, keepdim=True) if x.shape[1] else bits.new_zeros((x.shape[0], 1))
    elif units.columns != "each":
        short = -x.shape[1] % units.columns
        padded = torch.nn.functional.pad(bits, (0, short)) if short else bits
        bits = padded.view(x.shape[0], padded.shape[1] // units.columns, units.columns).amax(2)
    if units.rows == "each":
        return bits
    return segment_amax(bits, groups, None if units.rows == "group" else units.rows)


def group_amax(x: Tensor, groups: RowGroups) -> Tensor:
    """fp32 [G]: max |x| of each group, NaN where it holds one, 0 where it has no rows."""
    return bits_of(unit_amax(x, groups, PER_GROUP))[:, 0].view(torch.float32)


class Spread:
    """Carries values of units [S, C] back over the elements [M, K]."""

    def __init__(self, units: Units, groups: RowGroups, columns: int) -> None:
        self.columns = columns
        self.width = 1 if isinstance(units.columns, str) else units.columns
        self.index: Tensor | None = None
        if units.rows == "group":
            self.index = groups.safe_group
        elif units.rows != "each":
            self.index = groups.by_block(units.rows).index

    def __call__(self, value: Tensor) -> Tensor:
        """[S, C] to [M, K], or [M, 1] where one unit spans all columns."""
        if self.index is not None:
            # the tail's segment lies past the last unit; what it reads is masked
            value = value.index_select(0, self.index.clamp(max=max(value.shape[0] - 1, 0)))
        if self.width > 1:
            value = value.unsqueeze(2).expand(-1, -1, self.width).flatten(1)[:, : self.columns]
        return value


def quantize_plane(
    x: Tensor,
    groups: RowGroups,
    spec: QuantizerSpec,
    direction: Direction,
    noise: Noise | None,
    scale: Tensor | None,
    group_bits: Tensor | None = None,
) -> Plane:
    """One direction of the rows `x` [M, K], fp32, which are zero past the sum.

    group_bits   [G] bit patterns of the groups' amaxes, where `x` has only some of their rows; None: those of `x`
    """
    units = units_of(spec, direction)
    spread = Spread(units, groups, x.shape[1])
    if spec.scaling == "delayed":
        assert scale is not None  # the front end has checked it
        encode = scale.to(torch.float32)[:, None]
        # history gives the scale, so only the elements themselves can be poisoned
        scaled = x * spread(encode)
        codes = to_fp8(scaled, spec.format, ~x.isfinite())
        return Plane(codes, decode_scale(encode, torch.zeros_like(encode, dtype=torch.bool)), None, scaled)
    by_group = group_bits is not None and units == PER_GROUP
    amax = group_bits[:, None] if group_bits is not None and by_group else unit_amax(x, groups, units)
    if spec.scaling == "nvfp4":
        of_groups = unit_amax(x, groups, PER_GROUP) if group_bits is None else group_bits[:, None]
        draws = None if noise is None else _draws(groups, x.shape[1], direction, noise)
        return _nvfp4_plane(x, amax, of_groups, groups, units, spread, draws)
    if spec.scaling == "mxfp8":
        encode, decode = e8m0_scales(amax, spec.format)
    else:
        encode, decode = fp32_scales(amax, spec.format, spec.amax_epsilon, spec.power_of_two)
    scaled = x * spread(encode)
    return Plane(to_fp8(scaled, spec.format, spread(poisoned_by(amax))), decode, None, scaled)


def _nvfp4_plane(
    x: Tensor,
    amax: Tensor,
    group_bits: Tensor,
    groups: RowGroups,
    units: Units,
    spread: Spread,
    draws: Tensor | None,
) -> Plane:
    encode, decode, _ = nvfp4_scales(amax, group_bits.index_select(0, _group_of_units(units, groups, amax.shape[0])))
    _, _, factor = nvfp4_scales(group_bits, group_bits)
    poisoned = poisoned_by(group_bits).index_select(0, groups.safe_group)
    scaled = x * spread(encode)
    return Plane(to_e2m1(scaled, poisoned, draws), decode, factor[:, 0], scaled)


def _group_of_units(units: Units, groups: RowGroups, segments: int) -> Tensor:
    """int64 [segments]: the group of each row segment of the units, which are each row's or each block's."""
    return groups.safe_group if units.rows == "each" else groups.group_of_blocks(int(units.rows), segments)


def _draws(groups: RowGroups, columns: int, direction: Direction, noise: Noise) -> Tensor:
    """int32 [M, K]: sixteen random bits for each element, by its position within its group."""
    size = 16
    group = groups.safe_group + noise.group_offset
    if direction == "rowwise":
        block = torch.arange(-(-columns // size), device=group.device)
        draws = block_draws(
            groups.local[:, None], block, group[:, None], operand=noise.operand, stream=0, seed=noise.seed
        )
        return draws.flatten(1)[:, :columns]
    _, first = groups.blocks_of(size)
    segments = groups.by_block(size)
    panel = torch.arange(segments.count, device=group.device)
    owner = groups.group_of_blocks(size, segments.count)
    draws = block_draws(
        torch.arange(columns, device=group.device),
        (panel - first[owner])[:, None],
        (owner + noise.group_offset)[:, None],
        operand=noise.operand,
        stream=1,
        seed=noise.seed,
    )
    by_row = draws.permute(0, 2, 1).reshape(-1, columns)
    where = segments.index * size + groups.local % size
    return by_row.index_select(0, where.clamp_(max=max(by_row.shape[0] - 1, 0)))


def dequantize_reference(q: GroupedTensor, direction: Direction) -> Tensor:
    """fp32 values of one plane: logical shape, or the padded Hadamard-domain rows of Hadamard column data.

    Rows past the sum are +0 and their codes and scales are not used; NaN is 0x7FC00000.
    """
    codes, scale, factor = q.plane(direction)
    layout, spec = q.spec, q.spec.quantizer
    columns = layout.shape[-1]
    if q.group_sizes is None:
        groups = RowGroups.stacked(layout.groups, layout.shape[1], codes.device)
    else:
        groups = RowGroups(q.group_sizes, layout.shape[0])
    if direction == "columnwise" and spec.hadamard:
        groups = groups.padded(HADAMARD_SIZE)
    result = plane_values(codes.reshape(groups.rows, columns), scale, factor, groups, spec, direction)
    if q.group_sizes is not None:
        result = result.masked_fill_(~groups.valid[:, None], 0.0)
    return result.view(layout.payload_shape(direction))


def plane_values(
    codes: Tensor,
    scale: Tensor,
    factor: Tensor | None,
    groups: RowGroups,
    spec: QuantizerSpec,
    direction: Direction,
) -> Tensor:
    """fp32 values of codes [rows, K] and of decode scales in any shape; what rows past the sum have means nothing."""
    columns = codes.shape[1]
    if not columns:
        return torch.zeros_like(codes, dtype=torch.float32)
    units = units_of(spec, direction)
    widths = columns if units.columns == "each" else 1 if units.columns == "all" else -(-columns // units.columns)
    decode = _decoded(scale)
    decode = decode.reshape(decode.numel() // max(widths, 1), widths)
    if factor is not None:
        decode = decode * factor.index_select(0, _group_of_units(units, groups, decode.shape[0]))[:, None]
    return canonical_nan(from_codes(codes) * Spread(units, groups, columns)(decode))


def _decoded(scale: Tensor) -> Tensor:
    """Stored decode scales as fp32."""
    if scale.dtype is torch.uint8:
        return e8m0_to_float(scale)
    return scale if scale.dtype is torch.float32 else from_codes(scale)

"""Quantize one operand: every scaling, both directions, ragged or stacked.

A scale covers a unit, so one path serves every scaling: amax of the units, scales from amax, scales spread back over
the elements, cast.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from octavo import GroupedTensorSpec, QuantizerSpec
from octavo.quantizer import HADAMARD_SIZE, Direction
from octavo_torch.arithmetic.casts import bits_of, to_e2m1, to_fp8
from octavo_torch.arithmetic.groups import RowGroups
from octavo_torch.arithmetic.hadamard import hadamard_rows
from octavo_torch.arithmetic.philox import block_draws
from octavo_torch.arithmetic.scales import decode_scale, e8m0_scales, fp32_scales, nvfp4_scales, poisoned_by
from octavo_torch.arithmetic.units import PER_GROUP, Spread, Units, group_of_units, unit_amax, units_of
from octavo_torch.arrays.grouped_tensor import GroupedTensor

OPERAND_NUMBER = {"x": 0, "w": 1, "dy": 2}


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


def group_amax(x: Tensor, groups: RowGroups) -> Tensor:
    """fp32 [G]: max |x| of each group, NaN where it holds one, 0 where it has no rows."""
    return bits_of(unit_amax(x, groups, PER_GROUP))[:, 0].view(torch.float32)


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
    encode, decode, _ = nvfp4_scales(amax, group_bits.index_select(0, group_of_units(units, groups, amax.shape[0])))
    _, _, factor = nvfp4_scales(group_bits, group_bits)
    poisoned = poisoned_by(group_bits).index_select(0, groups.safe_group)
    scaled = x * spread(encode)
    return Plane(to_e2m1(scaled, poisoned, draws), decode, factor[:, 0], scaled)


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
    by_row = draws.permute(0, 2, 1).flatten(0, 1)
    where = segments.index * size + groups.local % size
    return by_row.index_select(0, where.clamp_(max=max(by_row.shape[0] - 1, 0)))

"""Quantize to NVFP4: blocks of 16 under one second-level scale per group, whose amax a pass before has taken.

Column data may go through a Hadamard transform along rows first; each group is then padded to whole runs of 16 rows,
in the payload, too, and the group's amax is that of what the transform gives.
"""

from __future__ import annotations

import triton
import triton.language as tl

from octavo_triton.kernels.device import device_function
from octavo_triton.kernels.formats import as_bits, bits_of, from_stored, sixteens, to_code
from octavo_triton.kernels.hadamard import hadamard
from octavo_triton.kernels.panels import PANEL, first_block, panel_rows, tile_of_panel
from octavo_triton.kernels.quantize_units import largest_of_group
from octavo_triton.kernels.scales import is_poisoned, nvfp4_scales
from octavo_triton.kernels.stochastic import draws, to_e2m1

SIDE = tl.constexpr(8)
"""Blocks of 16 in a panel, and in its 128 columns."""


@triton.jit
def hadamard_amax(
    x, table, of_groups, columns, groups, panels, matrix_rows, x_stride,
    DTYPE: tl.constexpr, STACKED: tl.constexpr, APART: tl.constexpr, EVEN: tl.constexpr = False,
):  # fmt: skip
    """The amax pattern of one panel's transformed values and 128 columns into that of its group, see unit_amax."""
    if EVEN:
        columns = sixteens(columns)
        x_stride = sixteens(x_stride)
    x = as_bits(x)
    panel, tile = tile_of_panel(columns)
    group, first, _start, end = panel_rows(table, panel, groups, panels, matrix_rows, STACKED)
    if group < groups:
        row = first + tl.arange(0, PANEL)
        column = tile * PANEL + tl.arange(0, PANEL)
        inside = (row < end)[:, None] & (column < columns)[None, :]
        stored = tl.load(x + row[:, None] * x_stride + column[None, :], mask=inside, other=0)
        turned = hadamard(tl.reshape(from_stored(stored, DTYPE), (SIDE, 16, PANEL)), SIDE, PANEL)
        magnitude = bits_of(turned) & 0x7FFFFFFF
        largest_of_group(of_groups, group, tl.max(tl.max(tl.max(magnitude, 2), 1), 0), APART)


@triton.jit
def nvfp4_factors(amax, factors, groups, SIZE: tl.constexpr):
    """The second-level decode factors [G] of groups with these amax patterns."""
    group = tl.arange(0, SIZE)
    bits = tl.load(amax + group, mask=group < groups, other=0)
    _encode, _code, factor = nvfp4_scales(bits, bits)
    tl.store(factors + group, factor, mask=group < groups)


@device_function
def e2m1_codes(value, encode, random, group_amax, STOCHASTIC: tl.constexpr):
    """Codes (uint8) of values times their block's scale; of a poisoned group every code is 0x7."""
    scaled = value * encode
    codes = to_e2m1(scaled, random) if STOCHASTIC else to_code(scaled, "e2m1")
    return tl.where(is_poisoned(group_amax), 0x7, codes).to(tl.uint8)


@triton.jit
def quantize_nvfp4(
    x, row_amax, column_amax, table, seed, row_codes, row_scale, column_codes, column_scale,
    columns, groups, panels, matrix_rows, x_stride, group_offset, operand,
    DTYPE: tl.constexpr, SQUARE: tl.constexpr, HADAMARD: tl.constexpr, STOCHASTIC: tl.constexpr, STACKED: tl.constexpr,
    EVEN: tl.constexpr = False,
):  # fmt: skip
    """One panel and 128 columns of it; a plane whose codes are None is not made, square blocks go to the row plane.

    row_amax, column_amax   patterns [G] of what each plane is made of
    seed                    int64 []; or uint32 [3], its two words and a number that is added to `group_offset`
    operand                 its number in the random bits' counter: 0 x, 1 w, 2 dy
    """
    if EVEN:
        columns = sixteens(columns)
        x_stride = sixteens(x_stride)
    x = as_bits(x)
    if row_codes is not None:
        row_scale = as_bits(row_scale)
    if column_codes is not None:
        column_scale = as_bits(column_scale)
    panel, tile = tile_of_panel(columns)
    group, first, start, end = panel_rows(table, panel, groups, panels, matrix_rows, STACKED)
    if group < groups:
        row = first + tl.arange(0, PANEL)
        column = tile * PANEL + tl.arange(0, PANEL)
        column_real = column < columns
        inside = (row < end)[:, None] & column_real[None, :]
        value = from_stored(tl.load(x + row[:, None] * x_stride + column[None, :], mask=inside, other=0), DTYPE)
        across = (columns + 15) // 16
        side = tl.arange(0, SIDE)
        block_column = tile * SIDE + side
        local_block = (first - start) // 16 + side
        block_row = first_block(table, group, groups, matrix_rows, 16, STACKED) + local_block
        block_real = first + side * 16 < end
        numbered = (group + group_offset).to(tl.int32)
        if STOCHASTIC:
            if seed.dtype.element_ty == tl.uint32:
                key = tl.load(seed).to(tl.uint64) | (tl.load(seed + 1).to(tl.uint64) << 32)
                numbered += tl.load(seed + 2).to(tl.int32, bitcast=True)
            else:
                key = tl.load(seed)
        if row_codes is not None:
            group_amax = tl.load(row_amax + group) + tl.full((1, 1), 0, tl.int32)
            amax = tl.max(tl.reshape(bits_of(value) & 0x7FFFFFFF, (PANEL, SIDE, 16)), 2)
            random = tl.full((1, 1, 1), 0, tl.int32)
            if STOCHASTIC:
                random = draws(key, (row - start).to(tl.int32), block_column, numbered, 8 * operand, PANEL, SIDE)
            if SQUARE:
                amax = tl.max(tl.reshape(amax, (SIDE, 16, SIDE)), 1)
                encode, decode, _factor = nvfp4_scales(amax, group_amax)
                tiles = tl.reshape(value, (SIDE, 16, SIDE, 16))
                random = tl.reshape(random, (SIDE, 16, SIDE, 16) if STOCHASTIC else (1, 1, 1, 1))
                codes = e2m1_codes(tiles, encode[:, None, :, None], random, group_amax[:, :, None, None], STOCHASTIC)
                at = block_row[:, None] * across + block_column[None, :]
                real = block_real[:, None] & (block_column < across)[None, :]
            else:
                encode, decode, _factor = nvfp4_scales(amax, group_amax)
                tiles = tl.reshape(value, (PANEL, SIDE, 16))
                codes = e2m1_codes(tiles, encode[:, :, None], random, group_amax[:, :, None], STOCHASTIC)
                at = row[:, None] * across + block_column[None, :]
                real = (row < end)[:, None] & (block_column < across)[None, :]
            codes = tl.reshape(codes, (PANEL, PANEL))
            tl.store(row_codes + row[:, None] * columns + column[None, :], codes, mask=inside)
            tl.store(row_scale + at, decode.to(tl.uint8), mask=real)
        if column_codes is not None:
            tiles = tl.reshape(value, (SIDE, 16, PANEL))
            to_row = row
            to_real = inside
            if HADAMARD:
                tiles = hadamard(tiles, SIDE, PANEL)
                to_row = tl.reshape(block_row[:, None] * 16 + tl.arange(0, 16), (PANEL,))
                of_run = tl.reshape(block_real[:, None] & (tl.arange(0, 16) >= 0)[None, :], (PANEL,))
                to_real = of_run[:, None] & column_real[None, :]
            group_amax = tl.load(column_amax + group) + tl.full((1, 1), 0, tl.int32)
            amax = tl.max(bits_of(tiles) & 0x7FFFFFFF, 1)
            encode, decode, _factor = nvfp4_scales(amax, group_amax)
            random = tl.full((1, 1, 1), 0, tl.int32)
            if STOCHASTIC:
                number = 8 * operand + 2
                random = draws(key, column, local_block.to(tl.int32), numbered, number, PANEL, SIDE)
                random = tl.permute(random, (1, 2, 0))
            codes = e2m1_codes(tiles, encode[:, None, :], random, group_amax[:, :, None], STOCHASTIC)
            codes = tl.reshape(codes, (PANEL, PANEL))
            tl.store(column_codes + to_row[:, None] * columns + column[None, :], codes, mask=to_real)
            at = block_row[:, None] * columns + column[None, :]
            tl.store(column_scale + at, decode.to(tl.uint8), mask=block_real[:, None] & column_real[None, :])

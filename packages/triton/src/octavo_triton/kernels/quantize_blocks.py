"""Quantize in blocks of one level, both planes in one pass: BlockScaling and MXFP8.

  reads   x                  [M, K], once
  writes  row codes [M, K], scales [M, K / B]; column codes [M, K] or turned, scales [blocks, K]; of square blocks the
          scales of one plane

A program has 128 rows of one group and 128 columns, whole blocks in both directions, so nothing is read twice.
"""

from __future__ import annotations

import triton
import triton.language as tl

from octavo_triton.kernels.device import device_function
from octavo_triton.kernels.formats import as_bits, bits_of, float_from, fp8_codes, from_stored, sixteens
from octavo_triton.kernels.panels import PANEL, first_block, panel_rows, tile_of_panel
from octavo_triton.kernels.scales import block_scales, is_poisoned


@device_function
def poisoned(encode, amax):
    """Encode scales, NaN where the unit holds what is not finite: then each of its codes becomes NaN's."""
    return float_from(tl.where(is_poisoned(amax), 0x7FC00000, bits_of(encode)))


@device_function
def load_tile(x, first, end, start_column, columns, stride, DTYPE: tl.constexpr):
    """fp32 of 128 rows and 128 columns, zeros past the group and past the columns; and what is inside."""
    row = tl.arange(0, PANEL)
    column = start_column + tl.arange(0, PANEL)
    inside = (first + row < end)[:, None] & (column < columns)[None, :]
    stored = tl.load(x + first * stride + (row[:, None] * stride + column[None, :]), mask=inside, other=0)
    return from_stored(stored, DTYPE), inside


@device_function
def store_turned(turned, codes, panel, start_column, columns):
    """Codes [128, 128] as columns [P, C, 128]: the rows of one panel lie side by side."""
    column = start_column + tl.arange(0, PANEL)
    row = tl.arange(0, PANEL)
    to = turned + panel * columns * PANEL + (column[:, None] * PANEL + row[None, :])
    tl.store(to, tl.trans(codes), mask=(column < columns)[:, None] & (row >= 0)[None, :])


@triton.jit
def quantize_blocks(
    x, table, row_codes, row_scale, column_codes, column_scale,
    columns, groups, panels, matrix_rows, x_stride, epsilon,
    DTYPE: tl.constexpr, FORMAT: tl.constexpr, SCALES: tl.constexpr, POWER_OF_TWO: tl.constexpr, BLOCK: tl.constexpr,
    SQUARE: tl.constexpr, TURNED: tl.constexpr, STACKED: tl.constexpr, CAST: tl.constexpr,
    EVEN: tl.constexpr = False,
):  # fmt: skip
    """One panel and 128 columns of it, into the planes whose codes are not None.

    row_scale   of square blocks the scales of either plane
    """
    SIDE: tl.constexpr = PANEL // BLOCK
    if EVEN:
        columns = sixteens(columns)
        x_stride = sixteens(x_stride)
    x = as_bits(x)
    if row_codes is not None:
        row_codes = as_bits(row_codes)
    if column_codes is not None:
        column_codes = as_bits(column_codes)
    if BLOCK == PANEL:
        panel, tile = tile_of_panel(columns)
    else:
        panel, tile = tl.program_id(0), tl.program_id(1)
    group, first, start, end = panel_rows(table, panel, groups, panels, matrix_rows, STACKED)
    if group < groups:
        start_column = tile * PANEL
        value, inside = load_tile(x, first, end, start_column, columns, x_stride, DTYPE)
        row = tl.arange(0, PANEL)
        column = start_column + row
        magnitude = bits_of(value) & 0x7FFFFFFF
        base = first * columns
        at = row[:, None] * columns + column[None, :]
        across = (columns + BLOCK - 1) // BLOCK
        block_column = tile * SIDE + tl.arange(0, SIDE)
        of_group = first_block(table, group, groups, matrix_rows, BLOCK, STACKED)
        block_row = of_group + (first - start) // BLOCK + tl.arange(0, SIDE)
        block_real = first + tl.arange(0, SIDE) * BLOCK < end
        if TURNED:
            turned_panel = first_block(table, group, groups, matrix_rows, PANEL, STACKED) + (first - start) // PANEL
        if SQUARE:
            amax = tl.max(tl.reshape(magnitude, (PANEL, SIDE, BLOCK)), 2)
            amax = tl.max(tl.reshape(amax, (SIDE, BLOCK, SIDE)), 1)
            encode, decode = block_scales(amax, epsilon, FORMAT, SCALES, POWER_OF_TWO)
            tiles = tl.reshape(value, (SIDE, BLOCK, SIDE, BLOCK))
            codes = fp8_codes(tiles * poisoned(encode, amax)[:, None, :, None], FORMAT, CAST)
            codes = tl.reshape(codes, (PANEL, PANEL))
            scale_at = block_row[:, None] * across + block_column[None, :]
            real = block_real[:, None] & (block_column < across)[None, :]
            tl.store(row_scale + scale_at, decode.to(row_scale.dtype.element_ty), mask=real)
            if row_codes is not None:
                tl.store(row_codes + base + at, codes, mask=inside)
            if TURNED:
                store_turned(column_codes, codes, turned_panel, start_column, columns)
        else:
            if row_codes is not None:
                amax = tl.max(tl.reshape(magnitude, (PANEL, SIDE, BLOCK)), 2)
                encode, decode = block_scales(amax, epsilon, FORMAT, SCALES, POWER_OF_TWO)
                tiles = tl.reshape(value, (PANEL, SIDE, BLOCK))
                codes = fp8_codes(tiles * poisoned(encode, amax)[:, :, None], FORMAT, CAST)
                scale_at = (first + row)[:, None] * across + block_column[None, :]
                real = (first + row < end)[:, None] & (block_column < across)[None, :]
                tl.store(row_codes + base + at, tl.reshape(codes, (PANEL, PANEL)), mask=inside)
                tl.store(row_scale + scale_at, decode.to(row_scale.dtype.element_ty), mask=real)
            if column_codes is not None:
                tiles = tl.reshape(value, (SIDE, BLOCK, PANEL))
                amax = tl.max(tl.reshape(magnitude, (SIDE, BLOCK, PANEL)), 1)
                encode, decode = block_scales(amax, epsilon, FORMAT, SCALES, POWER_OF_TWO)
                codes = fp8_codes(tiles * poisoned(encode, amax)[:, None, :], FORMAT, CAST)
                codes = tl.reshape(codes, (PANEL, PANEL))
                if TURNED:
                    store_turned(column_codes, codes, turned_panel, start_column, columns)
                else:
                    tl.store(column_codes + base + at, codes, mask=inside)
                scale_at = block_row[:, None] * columns + column[None, :]
                real = block_real[:, None] & (column < columns)[None, :]
                tl.store(column_scale + scale_at, decode.to(column_scale.dtype.element_ty), mask=real)

"""Quantize in blocks of one level, both planes in one pass: BlockScaling and MXFP8.

  reads   x                  [M, K], once
  writes  row codes [M, K], scales [M, K / B]; column codes [M, K], scales [blocks, K]; of square blocks one plane

A program has 128 rows of one group and 128 columns, whole blocks in both directions, so nothing is read twice.
"""

from __future__ import annotations

import triton
import triton.language as tl

from octavo_torch_triton.kernels.device import device_function
from octavo_torch_triton.kernels.formats import bits_of, from_stored, to_code
from octavo_torch_triton.kernels.panels import PANEL, first_block, panel_rows
from octavo_torch_triton.kernels.scales import block_scales, is_poisoned


@device_function
def codes_of(value, encode, amax, FORMAT: tl.constexpr):
    """Codes (uint8) of values times their unit's scale; of poisoned units every code is NaN's."""
    return tl.where(is_poisoned(amax), 0x7F, to_code(value * encode, FORMAT)).to(tl.uint8)


@triton.jit
def quantize_blocks(
    x, row_codes, row_scale, column_codes, column_scale, table,
    columns, groups, panels, matrix_rows, x_stride, epsilon,
    DTYPE: tl.constexpr, FORMAT: tl.constexpr, SCALES: tl.constexpr, POWER_OF_TWO: tl.constexpr, BLOCK: tl.constexpr,
    SQUARE: tl.constexpr, ROWWISE: tl.constexpr, COLUMNWISE: tl.constexpr, STACKED: tl.constexpr,
):  # fmt: skip
    """One panel and 128 columns of it; square blocks are written to the row plane."""
    SIDE: tl.constexpr = PANEL // BLOCK
    group, first, start, end = panel_rows(table, tl.program_id(0), groups, panels, matrix_rows, STACKED)
    if group < groups:
        row = first + tl.arange(0, PANEL)
        column = tl.program_id(1) * PANEL + tl.arange(0, PANEL)
        inside = (row < end)[:, None] & (column < columns)[None, :]
        stored = tl.load(x + row[:, None] * x_stride + column[None, :], mask=inside, other=0)
        value = from_stored(stored, DTYPE)
        magnitude = bits_of(value) & 0x7FFFFFFF
        at = row[:, None] * columns + column[None, :]
        across = (columns + BLOCK - 1) // BLOCK
        block_column = tl.program_id(1) * SIDE + tl.arange(0, SIDE)
        if COLUMNWISE or SQUARE:
            of_group = first_block(table, group, groups, matrix_rows, BLOCK, STACKED)
            block_row = of_group + (first - start) // BLOCK + tl.arange(0, SIDE)
            block_real = first + tl.arange(0, SIDE) * BLOCK < end
        if ROWWISE or SQUARE:
            amax = tl.max(tl.reshape(magnitude, (PANEL, SIDE, BLOCK)), 2)
            if SQUARE:
                amax = tl.max(tl.reshape(amax, (SIDE, BLOCK, SIDE)), 1)
                encode, decode = block_scales(amax, epsilon, FORMAT, SCALES, POWER_OF_TWO)
                tiles = tl.reshape(value, (SIDE, BLOCK, SIDE, BLOCK))
                codes = codes_of(tiles, encode[:, None, :, None], amax[:, None, :, None], FORMAT)
                scale_at = block_row[:, None] * across + block_column[None, :]
                real = block_real[:, None] & (block_column < across)[None, :]
            else:
                encode, decode = block_scales(amax, epsilon, FORMAT, SCALES, POWER_OF_TWO)
                tiles = tl.reshape(value, (PANEL, SIDE, BLOCK))
                codes = codes_of(tiles, encode[:, :, None], amax[:, :, None], FORMAT)
                scale_at = row[:, None] * across + block_column[None, :]
                real = (row < end)[:, None] & (block_column < across)[None, :]
            tl.store(row_codes + at, tl.reshape(codes, (PANEL, PANEL)), mask=inside)
            tl.store(row_scale + scale_at, decode.to(row_scale.dtype.element_ty), mask=real)
        if COLUMNWISE and not SQUARE:
            tiles = tl.reshape(value, (SIDE, BLOCK, PANEL))
            amax = tl.max(tl.reshape(magnitude, (SIDE, BLOCK, PANEL)), 1)
            encode, decode = block_scales(amax, epsilon, FORMAT, SCALES, POWER_OF_TWO)
            codes = codes_of(tiles, encode[:, None, :], amax[:, None, :], FORMAT)
            tl.store(column_codes + at, tl.reshape(codes, (PANEL, PANEL)), mask=inside)
            scale_at = block_row[:, None] * columns + column[None, :]
            real = block_real[:, None] & (column < columns)[None, :]
            tl.store(column_scale + scale_at, decode.to(column_scale.dtype.element_ty), mask=real)

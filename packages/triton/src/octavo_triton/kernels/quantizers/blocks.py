"""Quantize in blocks of one level, both planes in one pass: BlockScaling and MXFP8.

  reads   x                  [M, K], once
  writes  row codes [M, K], scales [M, K / B]; column codes [M, K] or turned, scales [blocks, K]; of square blocks the
          scales of one plane

A program has 128 rows of one group and 128 columns, whole blocks in both directions, so nothing is read twice.
"""

from __future__ import annotations

import triton
import triton.language as tl

from octavo_triton.kernels.formats import as_bits, fp8_codes, multiple_of_16, widened
from octavo_triton.kernels.maxima import largest_across, largest_down
from octavo_triton.kernels.panels import PANEL, first_block, panel_rows
from octavo_triton.kernels.quantizers.tiles import columns_of_tile, load_tile, rows_in_runs, store_turned
from octavo_triton.kernels.scales import block_scales, poisoned


@triton.jit
def quantize_blocks(
    x, table, row_codes, row_scale, column_codes, column_scale,
    columns, groups, panels, matrix_rows, x_stride, epsilon,
    DTYPE: tl.constexpr, FORMAT: tl.constexpr, SCALES: tl.constexpr, POWER_OF_TWO: tl.constexpr, BLOCK: tl.constexpr,
    SQUARE: tl.constexpr, TURNED: tl.constexpr, STACKED: tl.constexpr, CAST: tl.constexpr,
    RUN: tl.constexpr, WIDTH: tl.constexpr, BESIDE: tl.constexpr, EVEN: tl.constexpr = False,
):  # fmt: skip
    """One panel and WIDTH columns of it, into the planes whose codes are not None.

    row_scale           of square blocks the scales of either plane
    RUN, WIDTH, BESIDE  the tile, see quantizers.tiles
    """
    DOWN: tl.constexpr = PANEL // BLOCK
    ALONG: tl.constexpr = WIDTH // BLOCK
    OF_BLOCK: tl.constexpr = BLOCK // RUN
    if EVEN:
        columns = multiple_of_16(columns)
        x_stride = multiple_of_16(x_stride)
    x = as_bits(x)
    if row_codes is not None:
        row_codes = as_bits(row_codes)
    if column_codes is not None:
        column_codes = as_bits(column_codes)
    tiles = (columns + WIDTH - 1) // WIDTH
    tile = tl.program_id(0) % tiles
    group, first, start, end = panel_rows(table, tl.program_id(0) // tiles, groups, panels, matrix_rows, STACKED)
    if group < groups:
        left = (end - first).to(tl.int32)
        row, column = rows_in_runs(RUN), columns_of_tile(tile, WIDTH, BESIDE)
        inside = (row < left)[:, None] & (column < columns)[None, :]
        stored = load_tile(x + first * x_stride + (row[:, None] * x_stride + column[None, :]), inside)
        to = first * columns + (row[:, None] * columns + column[None, :])
        across = (columns + BLOCK - 1) // BLOCK
        block_column = tile * ALONG + tl.arange(0, ALONG)
        block_row = first_block(table, group, groups, matrix_rows, BLOCK, STACKED) + (first - start) // BLOCK
        block_row += tl.arange(0, DOWN)
        block_real = tl.arange(0, DOWN) * BLOCK < left
        if TURNED:
            turned_panel = first_block(table, group, groups, matrix_rows, PANEL, STACKED) + (first - start) // PANEL
        # all maxima before the first code: what they are of would be kept beyond it
        if SQUARE or column_codes is not None:
            column_amax = largest_down(stored, DTYPE, RUN, PANEL, WIDTH, BLOCK)
        if row_codes is not None and not SQUARE:
            row_amax = largest_across(stored, DTYPE, PANEL, WIDTH, BLOCK)
        if SQUARE:
            amax = tl.max(tl.reshape(column_amax, (DOWN, ALONG, BLOCK)), 2)
            encode, decode = block_scales(amax, epsilon, FORMAT, SCALES, POWER_OF_TWO)
            blocks = tl.reshape(widened(stored, DTYPE, "rows"), (RUN, DOWN, OF_BLOCK, ALONG, BLOCK))
            codes = fp8_codes(blocks * poisoned(encode, amax)[None, :, None, :, None], FORMAT, CAST)
            codes = tl.reshape(codes, (PANEL, WIDTH))
            scale_at = block_row[:, None] * across + block_column[None, :]
            real = block_real[:, None] & (block_column < across)[None, :]
            tl.store(row_scale + scale_at, decode.to(row_scale.dtype.element_ty), mask=real)
            if row_codes is not None:
                tl.store(row_codes + to, codes, mask=inside)
            if TURNED:
                store_turned(column_codes, codes, turned_panel, tile, columns, RUN, WIDTH)
        else:
            if row_codes is not None:
                encode, decode = block_scales(row_amax, epsilon, FORMAT, SCALES, POWER_OF_TWO)
                blocks = tl.reshape(widened(stored, DTYPE, "rows"), (PANEL, ALONG, BLOCK))
                codes = fp8_codes(blocks * poisoned(encode, row_amax)[:, :, None], FORMAT, CAST)
                scale_at = (first + row)[:, None] * across + block_column[None, :]
                real = (row < left)[:, None] & (block_column < across)[None, :]
                tl.store(row_codes + to, tl.reshape(codes, (PANEL, WIDTH)), mask=inside)
                tl.store(row_scale + scale_at, decode.to(row_scale.dtype.element_ty), mask=real)
            if column_codes is not None:
                encode, decode = block_scales(column_amax, epsilon, FORMAT, SCALES, POWER_OF_TWO)
                blocks = tl.reshape(widened(stored, DTYPE, "columns"), (RUN, DOWN, OF_BLOCK, WIDTH))
                codes = fp8_codes(blocks * poisoned(encode, column_amax)[None, :, None, :], FORMAT, CAST)
                codes = tl.reshape(codes, (PANEL, WIDTH))
                if TURNED:
                    store_turned(column_codes, codes, turned_panel, tile, columns, RUN, WIDTH)
                else:
                    tl.store(column_codes + to, codes, mask=inside)
                scale_at = block_row[:, None] * columns + column[None, :]
                real = block_real[:, None] & (column < columns)[None, :]
                tl.store(column_scale + scale_at, decode.to(column_scale.dtype.element_ty), mask=real)

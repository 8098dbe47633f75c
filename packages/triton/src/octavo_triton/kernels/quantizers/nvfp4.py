"""Quantize to NVFP4: blocks of 16 under one second-level scale per group, whose amax a pass before has taken.

Column data may go through a Hadamard transform along rows first; each group is then padded to whole runs of 16 rows,
in the payload, too, and the group's amax is that of what the transform gives.
"""

from __future__ import annotations

import triton
import triton.language as tl

from octavo_triton.kernels.device import COMPILED, device_function
from octavo_triton.kernels.formats import as_bits, e2m1_bytes, multiple_of_16, widened
from octavo_triton.kernels.maxima import largest_across, largest_all, largest_down
from octavo_triton.kernels.panels import PANEL, first_block, panel_rows
from octavo_triton.kernels.quantizers.hadamard import hadamard
from octavo_triton.kernels.quantizers.stochastic import draws, to_e2m1
from octavo_triton.kernels.quantizers.tiles import columns_of_tile, load_tile, rows_in_runs
from octavo_triton.kernels.quantizers.units import largest_of_group
from octavo_triton.kernels.scales import is_poisoned, nvfp4_scales, poisoned

RUNS = tl.constexpr(8)
"""Runs of 16 rows in a panel."""


@triton.jit
def hadamard_amax(
    x, table, of_groups, of_transformed, columns, groups, panels, matrix_rows, x_stride,
    DTYPE: tl.constexpr, STACKED: tl.constexpr, APART: tl.constexpr, WIDTH: tl.constexpr, BESIDE: tl.constexpr,
    EVEN: tl.constexpr = False,
):  # fmt: skip
    """amax patterns of one panel and WIDTH columns, and of what the transform makes of them, into those of its group.

    of_groups, of_transformed   see unit_amax; what is None is not asked for
    """
    if EVEN:
        columns = multiple_of_16(columns)
        x_stride = multiple_of_16(x_stride)
    x = as_bits(x)
    across = (columns + WIDTH - 1) // WIDTH
    group, first, _start, end = panel_rows(table, tl.program_id(0) // across, groups, panels, matrix_rows, STACKED)
    if group < groups:
        row, column = rows_in_runs(16), columns_of_tile(tl.program_id(0) % across, WIDTH, BESIDE)
        inside = (first + row < end)[:, None] & (column < columns)[None, :]
        stored = load_tile(x + first * x_stride + (row[:, None] * x_stride + column[None, :]), inside)
        if of_groups is not None:
            largest_of_group(of_groups, group, largest_all(stored, DTYPE, PANEL, WIDTH), APART)
        turned = hadamard(tl.reshape(stored, (16, RUNS, WIDTH)), DTYPE, RUNS, WIDTH)
        turned = tl.reshape(turned, (PANEL, WIDTH))
        largest_of_group(of_transformed, group, largest_all(turned, "bfloat16", PANEL, WIDTH), APART)


@triton.jit
def nvfp4_factors(amax, factors, groups, SIZE: tl.constexpr):
    """The second-level decode factors [G] of groups with these amax patterns."""
    group = tl.arange(0, SIZE)
    bits = tl.load(amax + group, mask=group < groups, other=0)
    _encode, _code, factor = nvfp4_scales(bits, bits, False)
    tl.store(factors + group, factor, mask=group < groups)


@device_function
def e2m1_codes(value, encode, random, group_amax, STOCHASTIC: tl.constexpr):
    """Codes (uint8) of values times their block's scale; of a poisoned group every code is 0x7."""
    if STOCHASTIC:
        return tl.where(is_poisoned(group_amax), 0x7, to_e2m1(value * encode, random)).to(tl.uint8)
    elif COMPILED:
        # a product that is NaN has no sign on a GPU, and NaN is 0x7
        return e2m1_bytes(value * poisoned(encode, group_amax))
    else:
        return tl.where(is_poisoned(group_amax), 0x7, e2m1_bytes(value * encode)).to(tl.uint8)


@triton.jit
def quantize_nvfp4(
    x, row_amax, column_amax, table, seed, row_codes, row_scale, column_codes, column_scale,
    columns, groups, panels, matrix_rows, x_stride, group_offset, operand,
    DTYPE: tl.constexpr, SQUARE: tl.constexpr, HADAMARD: tl.constexpr, STOCHASTIC: tl.constexpr, STACKED: tl.constexpr,
    CAST: tl.constexpr, WIDTH: tl.constexpr, BESIDE: tl.constexpr, EVEN: tl.constexpr = False,
):  # fmt: skip
    """One panel and WIDTH columns of it; a plane whose codes are None is not made, square blocks go to the row plane.

    row_amax, column_amax   patterns [G] of what each plane is made of
    seed                    int64 []; or uint32 [3], its two words and a number that is added to `group_offset`
    operand                 its number in the random bits' counter: 0 x, 1 w, 2 dy
    """
    ALONG: tl.constexpr = WIDTH // 16
    if EVEN:
        columns = multiple_of_16(columns)
        x_stride = multiple_of_16(x_stride)
    x = as_bits(x)
    if row_codes is not None:
        row_scale = as_bits(row_scale)
    if column_codes is not None:
        column_scale = as_bits(column_scale)
    tiles = (columns + WIDTH - 1) // WIDTH
    tile = tl.program_id(0) % tiles
    group, first, start, end = panel_rows(table, tl.program_id(0) // tiles, groups, panels, matrix_rows, STACKED)
    if group < groups:
        left = (end - first).to(tl.int32)
        row, column = rows_in_runs(16), columns_of_tile(tile, WIDTH, BESIDE)
        column_real = column < columns
        inside = (row < left)[:, None] & column_real[None, :]
        stored = load_tile(x + first * x_stride + (row[:, None] * x_stride + column[None, :]), inside)
        at = row[:, None] * columns + column[None, :]
        across = (columns + 15) // 16
        block_column = tile * ALONG + tl.arange(0, ALONG)
        local_block = (first - start) // 16 + tl.arange(0, RUNS)
        block_row = first_block(table, group, groups, matrix_rows, 16, STACKED) + local_block
        block_real = tl.arange(0, RUNS) * 16 < left
        numbered = (group + group_offset).to(tl.int32)
        random = tl.full((1, 1), 0, tl.int32)
        if STOCHASTIC:
            if seed.dtype.element_ty == tl.uint32:
                key = tl.load(seed).to(tl.uint64) | (tl.load(seed + 1).to(tl.uint64) << 32)
                numbered += tl.load(seed + 2).to(tl.int32, bitcast=True)
            else:
                key = tl.load(seed)
        if row_codes is not None:
            group_amax = tl.load(row_amax + group) + tl.full((1, 1), 0, tl.int32)
            amax = largest_across(stored, DTYPE, PANEL, WIDTH, 16)
            of_row = random[:, :, None]
            if STOCHASTIC:
                local_row = (first - start).to(tl.int32) + row
                of_row = draws(key, local_row, block_column, numbered, 8 * operand, PANEL, ALONG)
            value = widened(stored, DTYPE, "rows")
            if SQUARE:
                amax = tl.max(tl.reshape(amax, (16, RUNS, ALONG)), 0)
                encode, decode, _factor = nvfp4_scales(amax, group_amax, CAST)
                of_row = tl.reshape(of_row, (16, RUNS, ALONG, 16) if STOCHASTIC else (1, 1, 1, 1))
                blocks = tl.reshape(value, (16, RUNS, ALONG, 16))
                codes = e2m1_codes(blocks, encode[None, :, :, None], of_row, group_amax[None, :, :, None], STOCHASTIC)
                scale_at = block_row[:, None] * across + block_column[None, :]
                real = block_real[:, None] & (block_column < across)[None, :]
            else:
                encode, decode, _factor = nvfp4_scales(amax, group_amax, CAST)
                blocks = tl.reshape(value, (PANEL, ALONG, 16))
                codes = e2m1_codes(blocks, encode[:, :, None], of_row, group_amax[:, :, None], STOCHASTIC)
                scale_at = (first + row)[:, None] * across + block_column[None, :]
                real = (row < left)[:, None] & (block_column < across)[None, :]
            tl.store(row_codes + first * columns + at, tl.reshape(codes, (PANEL, WIDTH)), mask=inside)
            tl.store(row_scale + scale_at, decode.to(tl.uint8), mask=real)
        if column_codes is not None:
            to, real = first * columns, inside
            tiles_of_runs = tl.reshape(stored, (16, RUNS, WIDTH))
            OF_COLUMNS: tl.constexpr = "bfloat16" if HADAMARD else DTYPE
            if HADAMARD:
                tiles_of_runs = hadamard(tiles_of_runs, DTYPE, RUNS, WIDTH)
                to = (first_block(table, group, groups, matrix_rows, 16, STACKED) * 16 + first - start) * columns
                # of whole runs, also the rows that fill the last one up
                real = (row // 16 * 16 < left)[:, None] & column_real[None, :]
            group_amax = tl.load(column_amax + group) + tl.full((1, 1), 0, tl.int32)
            amax = largest_down(tl.reshape(tiles_of_runs, (PANEL, WIDTH)), OF_COLUMNS, 16, PANEL, WIDTH, 16)
            encode, decode, _factor = nvfp4_scales(amax, group_amax, CAST)
            of_column = random[:, :, None]
            if STOCHASTIC:
                of_column = draws(key, column, local_block.to(tl.int32), numbered, 8 * operand + 2, WIDTH, RUNS)
                of_column = tl.permute(of_column, (2, 1, 0))
            value = widened(tiles_of_runs, OF_COLUMNS, "columns")
            codes = e2m1_codes(value, encode[None, :, :], of_column, group_amax[None, :, :], STOCHASTIC)
            tl.store(column_codes + to + at, tl.reshape(codes, (PANEL, WIDTH)), mask=real)
            scale_at = block_row[:, None] * columns + column[None, :]
            tl.store(column_scale + scale_at, decode.to(tl.uint8), mask=block_real[:, None] & column_real[None, :])

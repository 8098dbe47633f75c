"""Quantize with one scale per group, row or column of a group: delayed, current and row scaling.

These units reach over many tiles, so amax is taken first: `unit_amax` reads x, `quantize_units` reads it again and
writes codes and scales of both planes. Maxima of patterns are integers: no order of threads shows.
"""

from __future__ import annotations

import triton
import triton.language as tl

from octavo_triton.kernels.device import device_function
from octavo_triton.kernels.formats import as_bits, bits_of, float_from, fp8_codes, multiple_of_16, widened
from octavo_triton.kernels.maxima import largest_across, largest_all, largest_down
from octavo_triton.kernels.panels import PANEL, first_block, panel_rows, tile_of_panel
from octavo_triton.kernels.quantizers.tiles import columns_of_tile, load_tile, rows_in_runs, store_turned
from octavo_triton.kernels.scales import decode_of, fp32_encode, is_poisoned, poisoned


@device_function
def largest_of_group(of_groups, group, amax, APART: tl.constexpr):
    """A program's amax into its group's, or into its own place."""
    if APART:
        tl.store(of_groups + tl.program_id(0), amax)
    else:
        tl.atomic_max(of_groups + group, amax, sem="relaxed")


@triton.jit
def unit_amax(
    x, table, of_groups, of_rows, of_columns, columns, groups, panels, matrix_rows, x_stride,
    DTYPE: tl.constexpr, STACKED: tl.constexpr, APART: tl.constexpr, EVEN: tl.constexpr = False,
):  # fmt: skip
    """amax patterns of one panel and 128 columns into those of its group [G], its rows [M] and its columns [G, K].

    APART   stored beside those of other programs instead, for a framework without arrays that start as zeros and are
            written by many: of groups [P, T], of rows [M, T] and of columns [P, K], with T tiles of columns; panels of
            no group and rows past the sum are left out
    """
    if EVEN:
        columns = multiple_of_16(columns)
        x_stride = multiple_of_16(x_stride)
    x = as_bits(x)
    panel, tile = tile_of_panel(columns)
    group, first, _start, end = panel_rows(table, panel, groups, panels, matrix_rows, STACKED)
    if group < groups:
        row = first + tl.arange(0, PANEL)
        column = tile * PANEL + tl.arange(0, PANEL)
        inside = (row < end)[:, None] & (column < columns)[None, :]
        at = tl.arange(0, PANEL)[:, None] * x_stride + column[None, :]
        stored = load_tile(x + first * x_stride + at, inside)
        across = (columns + PANEL - 1) // PANEL
        if of_groups is not None:
            largest_of_group(of_groups, group, largest_all(stored, DTYPE, PANEL, PANEL), APART)
        if of_rows is not None:
            of_row = tl.reshape(largest_across(stored, DTYPE, PANEL, PANEL, PANEL), (PANEL,))
            if APART:
                tl.store(of_rows + row * across + tile, of_row, mask=row < end)
            else:
                tl.atomic_max(of_rows + row, of_row, mask=row < end, sem="relaxed")
        if of_columns is not None:
            of_column = tl.reshape(largest_down(stored, DTYPE, 1, PANEL, PANEL, PANEL), (PANEL,))
            if APART:
                tl.store(of_columns + panel.to(tl.int64) * columns + column, of_column, mask=column < columns)
            else:
                at = of_columns + group * columns + column
                tl.atomic_max(at, of_column, mask=column < columns, sem="relaxed")


@device_function
def store_decode(
    decode, encode, amax, units, epsilon, FORMAT: tl.constexpr, POWER_OF_TWO: tl.constexpr, SHARE: tl.constexpr
):  # fmt: skip
    """This program's SHARE of the decode scales [units], of encode scales that are given or else of amaxes."""
    unit = tl.program_id(0) * SHARE + tl.arange(0, SHARE)
    real = unit < units
    if encode is not None:
        scale = tl.load(encode + unit, mask=real, other=1.0)
        tl.store(decode + unit, decode_of(scale, scale != scale), mask=real)
    else:
        bits = tl.load(amax + unit, mask=real, other=0)
        scale = fp32_encode(bits, epsilon, FORMAT, POWER_OF_TWO)
        tl.store(decode + unit, decode_of(scale, is_poisoned(bits), POWER_OF_TWO), mask=real)


@triton.jit
def quantize_units(
    x, encode, group_amax, row_amax, column_amax, table, row_codes, column_codes, row_decode, column_decode,
    columns, groups, panels, matrix_rows, x_stride, epsilon, row_units, column_units,
    DTYPE: tl.constexpr, FORMAT: tl.constexpr, POWER_OF_TWO: tl.constexpr, TURNED: tl.constexpr,
    STACKED: tl.constexpr, CAST: tl.constexpr, RUN: tl.constexpr, BESIDE: tl.constexpr, SHARE: tl.constexpr,
    EVEN: tl.constexpr = False,
):  # fmt: skip
    """Codes of one panel and 128 columns: by the group's scale into either plane, or by rows and columns into theirs.

    encode        scales [G] that are given; where they are, each element that is not finite is NaN by itself
    row_decode, column_decode   scales of `row_units` and `column_units`, of which each program writes SHARE
    RUN, BESIDE   the tile, see quantizers.tiles
    """
    if row_decode is not None:
        of_units = row_amax if group_amax is None else group_amax
        store_decode(row_decode, encode, of_units, row_units, epsilon, FORMAT, POWER_OF_TWO, SHARE)
    if column_decode is not None:
        of_units = column_amax if group_amax is None else group_amax
        store_decode(column_decode, encode, of_units, column_units, epsilon, FORMAT, POWER_OF_TWO, SHARE)
    if EVEN:
        columns = multiple_of_16(columns)
        x_stride = multiple_of_16(x_stride)
    x = as_bits(x)
    if row_codes is not None:
        row_codes = as_bits(row_codes)
    if column_codes is not None:
        column_codes = as_bits(column_codes)
    panel, tile = tile_of_panel(columns, BACKWARDS=True)
    group, first, start, end = panel_rows(table, panel, groups, panels, matrix_rows, STACKED)
    if (group < groups) & (first < end):  # matrices without rows have one program, for their scales
        row, column = rows_in_runs(RUN), columns_of_tile(tile, PANEL, BESIDE)
        inside = (first + row < end)[:, None] & (column < columns)[None, :]
        stored = load_tile(x + first * x_stride + (row[:, None] * x_stride + column[None, :]), inside)
        base = first * columns
        at = row[:, None] * columns + column[None, :]
        if TURNED:
            turned_panel = first_block(table, group, groups, matrix_rows, PANEL, STACKED) + (first - start) // PANEL
        if encode is not None or group_amax is not None:
            value = widened(stored, DTYPE, "rows")
            if encode is not None:
                infinite = (bits_of(value) & 0x7FFFFFFF) >= 0x7F800000
                scaled = bits_of(value * tl.load(encode + group))
                # in place of a code, which is a byte among four of a register
                codes = fp8_codes(float_from(tl.where(infinite, 0x7FC00000, scaled)), FORMAT, CAST)
            else:
                amax = tl.full((1, 1), 0, tl.int32) + tl.load(group_amax + group)
                scale = poisoned(fp32_encode(amax, epsilon, FORMAT, POWER_OF_TWO), amax)
                codes = fp8_codes(value * scale, FORMAT, CAST)
            if row_codes is not None:
                tl.store(row_codes + base + at, codes, mask=inside)
            if TURNED:
                store_turned(column_codes, codes, turned_panel, tile, columns, RUN, PANEL)
        if row_amax is not None:
            amax = tl.load(row_amax + first + row, mask=first + row < end, other=0)
            scale = poisoned(fp32_encode(amax, epsilon, FORMAT, POWER_OF_TWO), amax)
            codes = fp8_codes(widened(stored, DTYPE, "rows") * scale[:, None], FORMAT, CAST)
            tl.store(row_codes + base + at, codes, mask=inside)
        if column_amax is not None:
            amax = tl.load(column_amax + group * columns + column, mask=column < columns, other=0)
            scale = poisoned(fp32_encode(amax, epsilon, FORMAT, POWER_OF_TWO), amax)
            codes = fp8_codes(widened(stored, DTYPE, "columns") * scale[None, :], FORMAT, CAST)
            if TURNED:
                store_turned(column_codes, codes, turned_panel, tile, columns, RUN, PANEL)
            else:
                tl.store(column_codes + base + at, codes, mask=inside)

"""From codes back to values, each code times its decode scale, rows past the sum +0; and from one layout to another."""

from __future__ import annotations

import triton
import triton.language as tl

from octavo_triton.kernels.formats import as_bits, bits_of, float_from, from_code, from_scale, multiple_of_16, to_stored
from octavo_triton.kernels.operands import scale_at
from octavo_triton.kernels.panels import PANEL, first_block, panel_rows


@triton.jit
def dequantize_plane(
    codes, scale, factor, table, out, rows, columns, groups, panels, matrix_rows,
    FORMAT: tl.constexpr, SCALING: tl.constexpr, SCALES: tl.constexpr, BLOCK: tl.constexpr, SQUARE: tl.constexpr,
    COLUMNWISE: tl.constexpr, STACKED: tl.constexpr, OUT_DTYPE: tl.constexpr, EVEN: tl.constexpr = False,
):  # fmt: skip
    """One panel and 128 columns of it."""
    if EVEN:
        columns = multiple_of_16(columns)
    codes = as_bits(codes)
    scale = as_bits(scale)
    out = as_bits(out)
    group, first, start, end = panel_rows(table, tl.program_id(0), groups, panels, matrix_rows, STACKED)
    row = first + tl.arange(0, PANEL)
    column = tl.program_id(1) * PANEL + tl.arange(0, PANEL)
    to = out + row[:, None] * columns + column[None, :]
    if group >= groups:
        zero = tl.full((PANEL, PANEL), 0, out.dtype.element_ty)
        tl.store(to, zero, mask=(row < rows)[:, None] & (column < columns)[None, :])
    else:
        inside = (row < end)[:, None] & (column < columns)[None, :]
        packed = first_block(table, group, groups, matrix_rows, BLOCK, STACKED)
        at = scale_at(
            group, row[:, None], (row - start)[:, None], column[None, :], packed, columns,
            SCALING, BLOCK, SQUARE, COLUMNWISE,
        )  # fmt: skip
        decode = from_scale(tl.load(scale + at + tl.full((PANEL, PANEL), 0, tl.int32), mask=inside, other=0), SCALES)
        if factor is not None:
            decode = decode * tl.load(factor + group)
        code = tl.load(codes + row[:, None] * columns + column[None, :], mask=inside, other=0)
        value = bits_of(from_code(code.to(tl.int32), FORMAT) * decode)
        value = float_from(tl.where((value & 0x7FFFFFFF) > 0x7F800000, 0x7FC00000, value))
        tl.store(to, to_stored(value, OUT_DTYPE), mask=inside)


@triton.jit
def turn_codes(
    given, table, made, columns, groups, panels, matrix_rows,
    BACK: tl.constexpr, STACKED: tl.constexpr, EVEN: tl.constexpr = False,
):  # fmt: skip
    """Plain column codes turned, with zeros where a panel has no row, or BACK; one panel and 128 columns of it."""
    if EVEN:
        columns = multiple_of_16(columns)
    given = as_bits(given)
    made = as_bits(made)
    group, first, start, end = panel_rows(table, tl.program_id(0), groups, panels, matrix_rows, STACKED)
    if group < groups:
        panel = first_block(table, group, groups, matrix_rows, PANEL, STACKED) + (first - start) // PANEL
        row = tl.arange(0, PANEL)
        column = tl.program_id(1) * PANEL + row
        real = (column < columns)[:, None] & (first + row < end)[None, :]
        plain_at = first * columns + (column[:, None] + row[None, :] * columns)
        turned_at = panel * columns * PANEL + (column[:, None] * PANEL + row[None, :])
        if BACK:
            tl.store(made + plain_at, tl.load(given + turned_at, mask=real, other=0), mask=real)
        else:
            whole = (column < columns)[:, None] & (row >= 0)[None, :]
            tl.store(made + turned_at, tl.load(given + plain_at, mask=real, other=0), mask=whole)

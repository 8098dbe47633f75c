"""fprop and dgrad: each row times its group's matrix.

A program has 128 rows of one group and COLUMNS columns of the result. The rows past the sum belong to programs without
a group, which write zeros.
"""

from __future__ import annotations

import triton
import triton.language as tl

from octavo_triton.kernels.formats import as_bits, from_stored, multiple_of_16, to_stored
from octavo_triton.kernels.operands import (
    added,
    added_scaled,
    coded,
    dequantized,
    multiplied_in_blocks,
    scale_at,
    times_scales,
    unquantized,
)
from octavo_triton.kernels.panels import PANEL, panel_rows


@triton.jit
def rows_times_matrices(
    a, a_scale, a_factor, b, b_scale, b_factor, bias, bias_scales, table, out,
    rows, depth, columns, groups, panels, a_row, a_column, b_group, b_depth, b_column, out_row, out_column,
    bias_group, bias_column, bias_scale,
    A_DTYPE: tl.constexpr, B_DTYPE: tl.constexpr, OUT_DTYPE: tl.constexpr, BIAS_DTYPE: tl.constexpr,
    SCALING: tl.constexpr, A_FORMAT: tl.constexpr, B_FORMAT: tl.constexpr, SCALES: tl.constexpr, BLOCK: tl.constexpr,
    SQUARE: tl.constexpr, COLUMNWISE: tl.constexpr, IN_PANELS: tl.constexpr, PRODUCT: tl.constexpr,
    COLUMNS: tl.constexpr, DEPTH: tl.constexpr, EVEN: tl.constexpr = False,
):  # fmt: skip
    """out[r, j] = sum over i of a[r, i] b[g, i, j], and the bias.

    COLUMNWISE   b's plane has a row for each i, as dgrad reads it; otherwise one for each j
    IN_PANELS    b is codes in turned panels, see layouts: 128 i lie side by side for each j, and b_depth is not used

    Strides are in elements.
    """
    if EVEN:
        depth = multiple_of_16(depth)
        columns = multiple_of_16(columns)
        a_row = multiple_of_16(a_row)
        b_group = multiple_of_16(b_group)
        if COLUMNWISE and not IN_PANELS:
            b_depth = multiple_of_16(b_depth)
        else:
            b_column = multiple_of_16(b_column)
        out_row = multiple_of_16(out_row)
        bias_group = multiple_of_16(bias_group)
    a = as_bits(a)
    b = as_bits(b)
    out = as_bits(out)
    if a_scale is not None:
        a_scale = as_bits(a_scale)
        b_scale = as_bits(b_scale)
    if bias is not None:
        bias = as_bits(bias)
    panel = tl.program_id(0)
    group, first, _start, end = panel_rows(table, panel, groups, panels, 0, False)
    row = first + tl.arange(0, PANEL)
    j = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    j_real = j < columns
    to = out + row[:, None] * out_row + j[None, :] * out_column
    if group >= groups:
        zero = tl.full((PANEL, COLUMNS), 0, out.dtype.element_ty)
        tl.store(to, zero, mask=(row < rows)[:, None] & j_real[None, :])
    else:
        row_real = row < end
        total = tl.full((PANEL, COLUMNS), 0.0, tl.float32)
        b_rows = depth if COLUMNWISE else columns
        b_first = group * ((b_rows + BLOCK - 1) // BLOCK)
        for begin in range(0, depth, DEPTH):
            i = begin + tl.arange(0, DEPTH)
            i_real = i < depth
            a_real = row_real[:, None] & i_real[None, :]
            left = tl.load(a + row[:, None] * a_row + i[None, :] * a_column, mask=a_real, other=0)
            if PRODUCT == "scaled":
                b_real = j_real[:, None] & i_real[None, :]
                right = tl.load(b + group * b_group + j[:, None] * b_column + i[None, :] * b_depth, b_real, other=0)
                k = begin + tl.arange(0, DEPTH // BLOCK) * BLOCK
                k_real = k < depth
                at = scale_at(group, row[:, None], 0, k[None, :], 0, depth, SCALING, BLOCK, False, False)
                left_scale = tl.load(a_scale + at, mask=row_real[:, None] & k_real[None, :], other=0)
                if COLUMNWISE:
                    at = scale_at(group, 0, k[None, :], j[:, None], b_first, columns, SCALING, BLOCK, SQUARE, True)
                else:
                    b_row = group * columns + j
                    at = scale_at(
                        group, b_row[:, None], j[:, None], k[None, :], b_first, depth, SCALING, BLOCK, SQUARE, False
                    )
                right_scale = tl.load(b_scale + at, mask=j_real[:, None] & k_real[None, :], other=0)
                total = multiplied_in_blocks(total, left, left_scale, right, right_scale, A_FORMAT, B_FORMAT)
            else:
                b_real = i_real[:, None] & j_real[None, :]
                of_i = (i // 128) * (columns * 128) + i % 128 if IN_PANELS else i * b_depth
                right = tl.load(b + group * b_group + of_i[:, None] + j[None, :] * b_column, b_real, other=0)
                if SCALING == "none":
                    left = unquantized(left, A_DTYPE, PRODUCT)
                    total = added(total, left, unquantized(right, B_DTYPE, PRODUCT), PRODUCT, DEPTH)
                elif SCALING == "group" or SCALING == "row":
                    left = coded(left, A_FORMAT, PRODUCT)
                    total = added(total, left, coded(right, B_FORMAT, PRODUCT), PRODUCT, DEPTH)
                elif SCALING == "block":
                    at = scale_at(group, row, 0, begin, 0, depth, SCALING, BLOCK, False, False)
                    left_scale = tl.load(a_scale + at, mask=row_real, other=0)
                    if COLUMNWISE:
                        at = scale_at(group, 0, begin, j, b_first, columns, SCALING, BLOCK, SQUARE, True)
                    else:
                        b_row = group * columns + j
                        at = scale_at(group, b_row, j, begin, b_first, depth, SCALING, BLOCK, SQUARE, False)
                    right_scale = tl.load(b_scale + at, mask=j_real, other=0)
                    left = coded(left, A_FORMAT, PRODUCT)
                    right = coded(right, B_FORMAT, PRODUCT)
                    total = added_scaled(total, left, right, left_scale[:, None], right_scale[None, :], PRODUCT, DEPTH)
                else:
                    at = scale_at(group, row[:, None], 0, i[None, :], 0, depth, SCALING, BLOCK, False, False)
                    left = dequantized(left, tl.load(a_scale + at, mask=a_real, other=0), A_FORMAT, SCALES, PRODUCT)
                    if COLUMNWISE:
                        at = scale_at(group, 0, i[:, None], j[None, :], b_first, columns, SCALING, BLOCK, SQUARE, True)
                    else:
                        b_row = group * columns + j
                        at = scale_at(
                            group, b_row[None, :], j[None, :], i[:, None], b_first, depth, SCALING, BLOCK, SQUARE, False
                        )
                    right = dequantized(right, tl.load(b_scale + at, mask=b_real, other=0), B_FORMAT, SCALES, PRODUCT)
                    total = added(total, left, right, PRODUCT, DEPTH)
        if SCALING == "group":
            total = times_scales(total, tl.load(a_scale + group), tl.load(b_scale + group))
        elif SCALING == "row":
            left_scale = tl.load(a_scale + row, mask=row_real, other=0)
            # b's scales are of its rows, or of its columns: either way of j
            right_scale = tl.load(b_scale + group * columns + j, mask=j_real, other=0)
            total = times_scales(total, left_scale[:, None], right_scale[None, :])
        elif SCALING == "nvfp4":
            total = times_scales(total, tl.load(a_factor + group), tl.load(b_factor + group))
        if bias is not None:
            stored = tl.load(bias + group * bias_group + j * bias_column, mask=j_real, other=0)
            added_bias = from_stored(stored, BIAS_DTYPE)[None, :]
            if bias_scales is not None:
                added_bias = tl.load(bias_scales + row * bias_scale, mask=row_real, other=0)[:, None] * added_bias
            total += added_bias
        tl.store(to, to_stored(total, OUT_DTYPE), mask=row_real[:, None] & j_real[None, :])

"""fprop and dgrad of operands that Hopper's copy engine can fetch: tiles by descriptors instead of pointers.

The tiles of a panel's rows may reach into the next group's, and past the sum: each row is multiplied for itself, and
rows of another group are not stored.
"""

from __future__ import annotations

import triton
import triton.language as tl

from octavo_triton.kernels.formats import as_bits, from_stored, multiple_of_16
from octavo_triton.kernels.operands import added, as_stored, coded, multiplied, scale_at, times_scales
from octavo_triton.kernels.panels import PANEL, panel_rows


@triton.jit
def described_rows(
    a, a_scale, b, b_scale, bias, bias_scales, table, out,
    rows, depth, columns, groups, panels, tiles, out_row, out_column, bias_group, bias_column, bias_scale,
    OUT_DTYPE: tl.constexpr, BIAS_DTYPE: tl.constexpr, SCALING: tl.constexpr, A_FORMAT: tl.constexpr,
    B_FORMAT: tl.constexpr, SQUARE: tl.constexpr, COLUMNWISE: tl.constexpr, PRODUCT: tl.constexpr,
    COLUMNS: tl.constexpr, DEPTH: tl.constexpr, BESIDE: tl.constexpr, EVEN: tl.constexpr = False,
    POINTERS: tl.constexpr = False,
):  # fmt: skip
    """out[r, j] = sum over i of a[r, i] b[g, i, j], and the bias.

    a        [M, I]
    b        [G, J, I]; COLUMNWISE, as dgrad reads it: values [G, I, J], or codes in turned panels
             [G ceil(I / 128), J, 128]
    tiles    of COLUMNS columns in a row of the result
    BESIDE   panels whose tiles are made at a time, so that matrices and rows stay in the cache
    POINTERS a and b are arrays of codes, of which the kernel makes descriptors: on chips without a copy engine these
             are pointers in any case, and jax-triton passes none there
    """
    if EVEN:
        columns = multiple_of_16(columns)
        depth = multiple_of_16(depth)
        out_row = multiple_of_16(out_row)
        bias_group = multiple_of_16(bias_group)
    if POINTERS:
        a = tl.make_tensor_descriptor(a, [rows, depth], [depth, 1], [PANEL, DEPTH])
        if COLUMNWISE:
            turned = groups * ((depth + 127) // 128)
            b = tl.make_tensor_descriptor(b, [turned, columns, 128], [columns * 128, 128, 1], [1, COLUMNS, DEPTH])
        else:
            b = tl.make_tensor_descriptor(b, [groups, columns, depth], [columns * depth, depth, 1], [1, COLUMNS, DEPTH])
    out = as_bits(out)
    if bias is not None:
        bias = as_bits(bias)
    part = tl.program_id(0) // (BESIDE * tiles)
    place = tl.program_id(0) % (BESIDE * tiles)
    wide = tl.minimum(panels - part * BESIDE, BESIDE)
    group, first, _start, end = panel_rows(table, part * BESIDE + place % wide, groups, panels, 0, False)
    start_column = (place // wide) * COLUMNS
    row = first + tl.arange(0, PANEL)
    j = start_column + tl.arange(0, COLUMNS)
    j_real = j < columns
    to = out + row[:, None] * out_row + j[None, :] * out_column
    if group >= groups:
        zero = tl.full((PANEL, COLUMNS), 0, out.dtype.element_ty)
        tl.store(to, zero, mask=(row < rows)[:, None] & j_real[None, :])
    else:
        row_real = row < end
        from_row = first.to(tl.int32)
        matrix = group.to(tl.int32)
        steps = (depth + DEPTH - 1) // DEPTH
        b_rows = depth if COLUMNWISE else columns
        b_first = group * ((b_rows + 127) // 128)
        total = tl.full((PANEL, COLUMNS), 0.0, tl.float32)
        for step in range(steps):
            left = a.load([from_row, step * DEPTH])
            if SCALING == "none":
                if COLUMNWISE:
                    right = tl.reshape(b.load([matrix, step * DEPTH, start_column]), (DEPTH, COLUMNS))
                else:
                    right = tl.trans(tl.reshape(b.load([matrix, start_column, step * DEPTH]), (COLUMNS, DEPTH)))
                total = added(total, left, right, PRODUCT, DEPTH)
            else:
                if COLUMNWISE:
                    right = b.load([matrix * steps + step, start_column, 0])
                else:
                    right = b.load([matrix, start_column, step * DEPTH])
                right = tl.trans(tl.reshape(right, (COLUMNS, DEPTH)))
                product = multiplied(coded(left, A_FORMAT, PRODUCT), coded(right, B_FORMAT, PRODUCT))
                if SCALING == "block":
                    begin = step * DEPTH
                    at = scale_at(group, row, 0, begin, 0, depth, SCALING, 128, False, False)
                    left_scale = tl.load(a_scale + at, mask=row_real, other=0)
                    if SQUARE and COLUMNS == 128:
                        # a tile's columns are those of one block
                        of_row, of_column = (begin, start_column) if COLUMNWISE else (start_column, begin)
                        b_columns = columns if COLUMNWISE else depth
                        at = scale_at(group, 0, of_row, of_column, b_first, b_columns, SCALING, 128, True, False)
                        total += times_scales(product, left_scale[:, None], tl.load(b_scale + at))
                    else:
                        if COLUMNWISE:
                            at = scale_at(group, 0, begin, j, b_first, columns, SCALING, 128, SQUARE, True)
                        else:
                            at = scale_at(
                                group, group * columns + j, j, begin, b_first, depth, SCALING, 128, SQUARE, False
                            )
                        right_scale = tl.load(b_scale + at, mask=j_real, other=0)
                        total += times_scales(product, left_scale[:, None], right_scale[None, :])
                else:
                    total += product
        if SCALING == "group":
            total = times_scales(total, tl.load(a_scale + group), tl.load(b_scale + group))
        elif SCALING == "row":
            left_scale = tl.load(a_scale + row, mask=row_real, other=0)
            right_scale = tl.load(b_scale + group * columns + j, mask=j_real, other=0)
            total = times_scales(total, left_scale[:, None], right_scale[None, :])
        if bias is not None:
            stored = tl.load(bias + group * bias_group + j * bias_column, mask=j_real, other=0)
            added_bias = from_stored(stored, BIAS_DTYPE)[None, :]
            if bias_scales is not None:
                added_bias = tl.load(bias_scales + row * bias_scale, mask=row_real, other=0)[:, None] * added_bias
            total += added_bias
        tl.store(to, as_stored(total, OUT_DTYPE), mask=row_real[:, None] & j_real[None, :])

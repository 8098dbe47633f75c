"""wgrad: dy_g^T x_g of each group, its rows summed in order."""

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
from octavo_triton.kernels.panels import first_block, word_of


@triton.jit
def columns_times_columns(
    a, a_scale, a_factor, b, b_scale, b_factor, table, out,
    height, width, groups, a_row, a_column, b_row, b_column, out_group, out_row, out_column,
    A_DTYPE: tl.constexpr, B_DTYPE: tl.constexpr, OUT_DTYPE: tl.constexpr, SCALING: tl.constexpr,
    A_FORMAT: tl.constexpr, B_FORMAT: tl.constexpr, SCALES: tl.constexpr, BLOCK: tl.constexpr, HADAMARD: tl.constexpr,
    PRODUCT: tl.constexpr, ACCUMULATE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
    EVEN: tl.constexpr = False,
):  # fmt: skip
    """out[g, n, k] = sum over the rows r of g of a[r, n] b[r, k], in a tile of ROWS and COLUMNS.

    ACCUMULATE: added to `out`, whose bits stay as they are for a group without rows. HADAMARD: each group has been
    padded to whole runs of 16 rows, which belong to the sum.
    """
    if EVEN:
        height = multiple_of_16(height)
        width = multiple_of_16(width)
        a_row = multiple_of_16(a_row)
        b_row = multiple_of_16(b_row)
        out_group = multiple_of_16(out_group)
        out_row = multiple_of_16(out_row)
    a = as_bits(a)
    b = as_bits(b)
    out = as_bits(out)
    if a_scale is not None:
        a_scale = as_bits(a_scale)
        b_scale = as_bits(b_scale)
    group = tl.program_id(2).to(tl.int64)
    n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    k = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    n_real = n < height
    k_real = k < width
    start = word_of(table + group)
    size = (word_of(table + group + 1) - start).to(tl.int32)
    first = first_block(table, group, groups, 0, BLOCK, False)
    if HADAMARD:
        start = first * 16
        size = (size + 15) // 16 * 16
    to = out + group * out_group + n[:, None] * out_row + k[None, :] * out_column
    real = n_real[:, None] & k_real[None, :]
    if size > 0 or not ACCUMULATE:
        total = tl.full((ROWS, COLUMNS), 0.0, tl.float32)
        for begin in range(0, size, DEPTH):
            local = begin + tl.arange(0, DEPTH)
            row = start + local
            row_real = local < size
            a_real = n_real[:, None] & row_real[None, :]
            left = tl.load(a + row[None, :] * a_row + n[:, None] * a_column, mask=a_real, other=0)
            if PRODUCT == "scaled":
                b_real = k_real[:, None] & row_real[None, :]
                right = tl.load(b + row[None, :] * b_row + k[:, None] * b_column, mask=b_real, other=0)
                block = begin + tl.arange(0, DEPTH // BLOCK) * BLOCK
                block_real = block < size
                at = scale_at(group, 0, block[None, :], n[:, None], first, height, SCALING, BLOCK, False, True)
                left_scale = tl.load(a_scale + at, mask=n_real[:, None] & block_real[None, :], other=0)
                at = scale_at(group, 0, block[None, :], k[:, None], first, width, SCALING, BLOCK, False, True)
                right_scale = tl.load(b_scale + at, mask=k_real[:, None] & block_real[None, :], other=0)
                total = multiplied_in_blocks(total, left, left_scale, right, right_scale, A_FORMAT, B_FORMAT)
            else:
                b_real = row_real[:, None] & k_real[None, :]
                right = tl.load(b + row[:, None] * b_row + k[None, :] * b_column, mask=b_real, other=0)
                if SCALING == "none":
                    left = unquantized(left, A_DTYPE, PRODUCT)
                    total = added(total, left, unquantized(right, B_DTYPE, PRODUCT), PRODUCT, DEPTH)
                elif SCALING == "group" or SCALING == "row":
                    left = coded(left, A_FORMAT, PRODUCT)
                    total = added(total, left, coded(right, B_FORMAT, PRODUCT), PRODUCT, DEPTH)
                elif SCALING == "block":
                    at = scale_at(group, 0, begin, n, first, height, SCALING, BLOCK, False, True)
                    left_scale = tl.load(a_scale + at, mask=n_real, other=0)
                    at = scale_at(group, 0, begin, k, first, width, SCALING, BLOCK, False, True)
                    right_scale = tl.load(b_scale + at, mask=k_real, other=0)
                    left = coded(left, A_FORMAT, PRODUCT)
                    right = coded(right, B_FORMAT, PRODUCT)
                    total = added_scaled(total, left, right, left_scale[:, None], right_scale[None, :], PRODUCT, DEPTH)
                else:
                    at = scale_at(group, 0, local[None, :], n[:, None], first, height, SCALING, BLOCK, False, True)
                    left = dequantized(left, tl.load(a_scale + at, mask=a_real, other=0), A_FORMAT, SCALES, PRODUCT)
                    at = scale_at(group, 0, local[:, None], k[None, :], first, width, SCALING, BLOCK, False, True)
                    right = dequantized(right, tl.load(b_scale + at, mask=b_real, other=0), B_FORMAT, SCALES, PRODUCT)
                    total = added(total, left, right, PRODUCT, DEPTH)
        if size > 0:
            if SCALING == "group":
                total = times_scales(total, tl.load(a_scale + group), tl.load(b_scale + group))
            elif SCALING == "row":
                left_scale = tl.load(a_scale + group * height + n, mask=n_real, other=0)
                right_scale = tl.load(b_scale + group * width + k, mask=k_real, other=0)
                total = times_scales(total, left_scale[:, None], right_scale[None, :])
            elif SCALING == "nvfp4":
                total = times_scales(total, tl.load(a_factor + group), tl.load(b_factor + group))
            if ACCUMULATE:
                total += from_stored(tl.load(to, mask=real, other=0), OUT_DTYPE)
        tl.store(to, to_stored(total, OUT_DTYPE), mask=real)

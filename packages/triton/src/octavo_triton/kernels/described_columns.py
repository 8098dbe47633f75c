"""wgrad of operands that Hopper's copy engine can fetch: tiles by descriptors instead of pointers.

Codes come in turned panels, in which a group's rows end with zeros. Of values the last tile of a group reaches into the
next group's rows, which are masked there and nowhere else.
"""

from __future__ import annotations

import triton
import triton.language as tl

from octavo_triton.kernels.device import device_function
from octavo_triton.kernels.formats import as_bits, from_stored, multiple_of_16
from octavo_triton.kernels.operands import added, as_stored, coded, multiplied, times_scales
from octavo_triton.kernels.panels import first_block, word_of


@device_function
def add_to(out, total, n, k, height, width, out_row, out_column, OUT_DTYPE: tl.constexpr):
    """fp32 sums of rows `n` and columns `k`, added to what one group's result holds there and rounded once."""
    to = out + n[:, None] * out_row + k[None, :] * out_column
    real = (n < height)[:, None] & (k < width)[None, :]
    added = total + from_stored(tl.load(to, mask=real, other=0), OUT_DTYPE)
    tl.store(to, as_stored(added, OUT_DTYPE), mask=real)


@triton.jit
def described_columns(
    a, a_scale, b, b_scale, table, out, height, width, groups, out_group, out_row, out_column,
    OUT_DTYPE: tl.constexpr, SCALING: tl.constexpr, A_FORMAT: tl.constexpr, B_FORMAT: tl.constexpr,
    PRODUCT: tl.constexpr, ACCUMULATE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
    BESIDE: tl.constexpr, EVEN: tl.constexpr = False, POINTERS: tl.constexpr = False,
):  # fmt: skip
    """out[g, n, k] = sum over the rows r of g of a[r, n] b[r, k], in a tile of ROWS and COLUMNS.

    a, b         values [M, N] and [M, K], or codes in turned panels [P, N, 128] and [P, K, 128]
    ACCUMULATE   added to `out`, whose bits stay as they are for a group without rows
    BESIDE       tiles of rows that are made at a time, so that both operands stay in the cache
    POINTERS     a and b are arrays of turned codes, see described_rows; nothing is read past their panels
    """
    if EVEN:
        height = multiple_of_16(height)
        width = multiple_of_16(width)
        out_group = multiple_of_16(out_group)
        out_row = multiple_of_16(out_row)
    if POINTERS:
        MANY: tl.constexpr = 0x7FFFFFFF
        a = tl.make_tensor_descriptor(a, [MANY, height, 128], [height * 128, 128, 1], [1, ROWS, DEPTH])
        b = tl.make_tensor_descriptor(b, [MANY, width, 128], [width * 128, 128, 1], [1, COLUMNS, DEPTH])
    out = as_bits(out)
    group = tl.program_id(1).to(tl.int64)
    across = (width + COLUMNS - 1) // COLUMNS
    part = tl.program_id(0) // (BESIDE * across)
    place = tl.program_id(0) % (BESIDE * across)
    high = tl.minimum((height + ROWS - 1) // ROWS - part * BESIDE, BESIDE)
    from_n = (part * BESIDE + place % high) * ROWS
    from_k = place // high * COLUMNS
    n = from_n + tl.arange(0, ROWS)
    k = from_k + tl.arange(0, COLUMNS)
    n_real = n < height
    k_real = k < width
    start = word_of(table + group)
    size = (word_of(table + group + 1) - start).to(tl.int32)
    to = out + group * out_group + n[:, None] * out_row + k[None, :] * out_column
    real = n_real[:, None] & k_real[None, :]
    if size > 0 or not ACCUMULATE:
        total = tl.full((ROWS, COLUMNS), 0.0, tl.float32)
        if SCALING == "none":
            row = start.to(tl.int32)
            whole = size // DEPTH
            for step in range(whole):
                left = a.load([row + step * DEPTH, from_n])
                total = added(total, tl.trans(left), b.load([row + step * DEPTH, from_k]), PRODUCT, DEPTH)
            if whole * DEPTH < size:
                mine = (whole * DEPTH + tl.arange(0, DEPTH) < size)[:, None]
                left = tl.where(mine, a.load([row + whole * DEPTH, from_n]), 0.0)
                right = tl.where(mine, b.load([row + whole * DEPTH, from_k]), 0.0)
                total = added(total, tl.trans(left), right, PRODUCT, DEPTH)
        else:
            first = first_block(table, group, groups, 0, 128, False)
            panel = first.to(tl.int32)
            for step in range((size + 127) // 128):
                left = coded(tl.reshape(a.load([panel + step, from_n, 0]), (ROWS, DEPTH)), A_FORMAT, PRODUCT)
                right = coded(tl.reshape(b.load([panel + step, from_k, 0]), (COLUMNS, DEPTH)), B_FORMAT, PRODUCT)
                product = multiplied(left, tl.trans(right))
                if SCALING == "block":
                    left_scale = tl.load(a_scale + (first + step) * height + n, mask=n_real, other=0)
                    right_scale = tl.load(b_scale + (first + step) * width + k, mask=k_real, other=0)
                    total += times_scales(product, left_scale[:, None], right_scale[None, :])
                else:
                    total += product
        if size > 0:
            if SCALING == "group":
                total = times_scales(total, tl.load(a_scale + group), tl.load(b_scale + group))
            elif SCALING == "row":
                left_scale = tl.load(a_scale + group * height + n, mask=n_real, other=0)
                right_scale = tl.load(b_scale + group * width + k, mask=k_real, other=0)
                total = times_scales(total, left_scale[:, None], right_scale[None, :])
        if ACCUMULATE and SCALING == "none":
            # a thread has 128 sums of values, and would spill with as many loaded beside them
            HALF: tl.constexpr = COLUMNS // 2
            lower, upper = tl.split(tl.permute(tl.reshape(total, (ROWS, 2, HALF)), (0, 2, 1)))
            of_group = out + group * out_group
            add_to(of_group, lower, n, from_k + tl.arange(0, HALF), height, width, out_row, out_column, OUT_DTYPE)
            from_half = from_k + HALF
            add_to(of_group, upper, n, from_half + tl.arange(0, HALF), height, width, out_row, out_column, OUT_DTYPE)
        else:
            if ACCUMULATE:
                total += from_stored(tl.load(to, mask=real, other=0), OUT_DTYPE)
            tl.store(to, as_stored(total, OUT_DTYPE), mask=real)

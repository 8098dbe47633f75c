"""wgrad of FP8 codes on Hopper: dy_g^T x_g of each group from turned panels, its rows summed in order, see ring."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from octavo_triton.kernels.hopper.ring import (
    COLUMNS,
    REGISTERS,
    STAGES,
    SUMS,
    added,
    copy_tile,
    multiplied,
    ring,
    scaled,
    to_fill,
    write,
)


@gluon.jit
def place(tile, table, groups, down, across, BESIDE: gl.constexpr):
    """(group, steps of its sum, its first panel, tile of rows, tile of columns), BESIDE tiles of rows at a time.

    table   of ragged rows, see panels, whose functions Gluon cannot call
    """
    group = tile // (down * across)
    inner = tile % (down * across)
    part = inner // (BESIDE * across)
    inner = inner % (BESIDE * across)
    high = gl.minimum(down - part * BESIDE, BESIDE)
    size = (gl.load(table + group + 1) - gl.load(table + group)).to(gl.int32)
    panel = gl.load(table + groups + 1 + group).to(gl.int32)
    return group, (size + 127) // 128, panel, part * BESIDE + inner % high, inner // high


@gluon.jit
def fetch(
    a, a_scale, b, b_scale, table, height, width, groups, down, across, a_tiles, a_scales, b_tiles, b_scales,
    full, empty, SCALING: gl.constexpr, BESIDE: gl.constexpr,
):  # fmt: skip
    """Fill stages with a panel's rows of a and b, and the scales of both."""
    BLOCKS: gl.constexpr = SCALING == "block"
    at = 0
    for tile in range(gl.program_id(0), groups * down * across, gl.num_programs(0)):
        _group, steps, panel, n, k = place(tile, table, groups, down, across, BESIDE)
        for step in range(steps):
            # bytes of 128 codes, and of their fp32 scale
            slot, arrived = to_fill(full, empty, at, (128 + COLUMNS) * (132 if BLOCKS else 128))
            a_row = (panel + step) * height + n * 128
            b_row = (panel + step) * width + k * COLUMNS
            copy_tile(a, [a_row, 0], arrived, a_tiles.index(slot))
            copy_tile(b, [b_row, 0], arrived, b_tiles.index(slot))
            if BLOCKS:
                copy_tile(a_scale, [panel + step, n * 128], arrived, a_scales.index(slot))
                copy_tile(b_scale, [panel + step, k * COLUMNS], arrived, b_scales.index(slot))
            at += 1


@gluon.jit
def promoted(total, product, rows, columns, FROM: gl.constexpr, PART: gl.constexpr):
    """total + product times the scales, fp32 [1, 128] and [1, COLUMNS] in shared memory, of its rows and columns."""
    of_rows = rows.reshape([128]).slice(FROM, 64).load(gl.SliceLayout(1, SUMS))
    of_columns = columns.reshape([COLUMNS]).slice(PART * 128, 128)
    left, right = gl.broadcast(of_rows[:, None], of_columns.load(gl.SliceLayout(0, SUMS))[None, :])
    # rounded toward zero, two scales' product ends at the largest number; a minimum for each sum would take as long as
    # the multiplication beside it
    scale = gl.inline_asm_elementwise(
        "mul.rz.f32 $0, $1, $2;", "=r,r,r", [left, right], dtype=gl.float32, is_pure=True, pack=1
    )
    return total + product * scale


@gluon.jit
def finish(
    total, a_scale, b_scale, out, group, steps, n, k, height, width, out_group, out_row, out_column,
    SCALING: gl.constexpr, ACCUMULATE: gl.constexpr,
):  # fmt: skip
    """Sums times the scales that all of them share, into `out` or added to it."""
    to = out + group.to(gl.int64) * out_group
    row = n + gl.arange(0, 64, gl.SliceLayout(1, SUMS))
    column = k + gl.arange(0, 128, gl.SliceLayout(0, SUMS))
    if steps > 0:
        if SCALING == "group":
            total = scaled(total, gl.load(a_scale + group), gl.load(b_scale + group))
        elif SCALING == "row":
            of_row = gl.load(a_scale + group * height + row, mask=row < height, other=0.0)
            of_column = gl.load(b_scale + group * width + column, mask=column < width, other=0.0)
            total = scaled(total, of_row[:, None], of_column[None, :])
    if ACCUMULATE:
        real = (row < height)[:, None] & (column < width)[None, :]
        held = to + row[:, None] * out_row + column[None, :] * out_column
        total += gl.load(held, mask=real, other=0.0).to(gl.float32)
    write(to, total, n, height, k, width, out_row, out_column)


@gluon.jit
def multiply(
    a_scale, b_scale, table, out, height, width, groups, down, across, out_group, out_row, out_column,
    a_tiles, a_scales, b_tiles, b_scales, full, empty,
    PART: gl.constexpr, SCALING: gl.constexpr, ACCUMULATE: gl.constexpr, BESIDE: gl.constexpr,
):  # fmt: skip
    """128 columns of each tile."""
    at = 0
    for tile in range(gl.program_id(0), groups * down * across, gl.num_programs(0)):
        group, steps, _panel, n, k = place(tile, table, groups, down, across, BESIDE)
        upper = gl.zeros([64, 128], gl.float32, SUMS)
        lower = gl.zeros([64, 128], gl.float32, SUMS)
        for _ in range(steps):
            slot = at % STAGES
            mbarrier.wait(full.index(slot), (at // STAGES) & 1)
            product = multiplied(a_tiles.index(slot), b_tiles.index(slot), 0, PART)
            if SCALING == "block":
                upper = promoted(upper, product, a_scales.index(slot), b_scales.index(slot), 0, PART)
            else:
                upper = added(upper, product)
            product = multiplied(a_tiles.index(slot), b_tiles.index(slot), 64, PART)
            if SCALING == "block":
                lower = promoted(lower, product, a_scales.index(slot), b_scales.index(slot), 64, PART)
            else:
                lower = added(lower, product)
            mbarrier.arrive(empty.index(slot), count=1)
            at += 1
        if steps > 0 or not ACCUMULATE:
            column = k * COLUMNS + PART * 128
            finish(
                upper, a_scale, b_scale, out, group, steps, n * 128, column, height, width,
                out_group, out_row, out_column, SCALING, ACCUMULATE,
            )  # fmt: skip
            finish(
                lower, a_scale, b_scale, out, group, steps, n * 128 + 64, column, height, width,
                out_group, out_row, out_column, SCALING, ACCUMULATE,
            )  # fmt: skip


@gluon.jit
def hopper_columns(
    a, a_scale, b, b_scale, table, out, height, width, groups, down, across, out_group, out_row, out_column,
    SCALING: gl.constexpr, ACCUMULATE: gl.constexpr, BESIDE: gl.constexpr, EVEN: gl.constexpr = False,
):  # fmt: skip
    """out[g, n, k] = sum over the rows r of g of a[r, n] b[r, k]; codes by descriptors of turned panels.

    a, b               [P N, 128] and [P K, 128]
    a_scale, b_scale   "block": descriptors of fp32 [P, N] and [P, K]; "row": [G, N] and [G, K]; "group": [G]
    ACCUMULATE         added to `out`, whose bits stay as they are for a group without rows
    """
    if EVEN:  # see formats.multiple_of_16
        height = height // 16 * 16
        width = width // 16 * 16
        out_group = out_group // 16 * 16
        out_row = out_row // 16 * 16
    a_tiles = gl.allocate_shared_memory(a.dtype, [STAGES, 128, 128], a.layout)
    b_tiles = gl.allocate_shared_memory(b.dtype, [STAGES, COLUMNS, 128], b.layout)
    if SCALING == "block":
        a_scales = gl.allocate_shared_memory(gl.float32, [STAGES, 1, 128], a_scale.layout)
        b_scales = gl.allocate_shared_memory(gl.float32, [STAGES, 1, COLUMNS], b_scale.layout)
    else:
        a_scales: gl.constexpr = None  # type: ignore[no-redef]
        b_scales: gl.constexpr = None  # type: ignore[no-redef]
    full, empty = ring(STAGES, 2)
    gl.warp_specialize(
        [
            (multiply, (
                a_scale, b_scale, table, out, height, width, groups, down, across, out_group, out_row, out_column,
                a_tiles, a_scales, b_tiles, b_scales, full, empty, 0, SCALING, ACCUMULATE, BESIDE,
            )),
            (multiply, (
                a_scale, b_scale, table, out, height, width, groups, down, across, out_group, out_row, out_column,
                a_tiles, a_scales, b_tiles, b_scales, full, empty, 1, SCALING, ACCUMULATE, BESIDE,
            )),
            (fetch, (
                a, a_scale, b, b_scale, table, height, width, groups, down, across,
                a_tiles, a_scales, b_tiles, b_scales, full, empty, SCALING, BESIDE,
            )),
        ],
        [4, 1],
        REGISTERS,
    )  # fmt: skip

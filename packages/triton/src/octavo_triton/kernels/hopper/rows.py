"""fprop and dgrad of FP8 codes on Hopper: each row times its group's matrix, see ring.

Tiles reach into the next group's rows, past the sum and into the next matrix: each row and each column is multiplied
for itself, and those of others are not stored.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from octavo_triton.kernels.hopper.ring import (
    COLUMNS,
    LARGEST,
    REGISTERS,
    STAGES,
    SUMS,
    copy_tile,
    multiplied,
    ring,
    scaled,
    to_fill,
    write,
)


@gluon.jit
def place(tile, table, groups, panels, tiles, BESIDE: gl.constexpr):
    """(group, first row, row after its group's last, tile of columns): BESIDE panels at a time, so that their rows and
    their matrix stay in the cache; group G: a panel of no group.

    table   of ragged rows, see panels, whose functions Gluon cannot call
    """
    part = tile // (BESIDE * tiles)
    inner = tile % (BESIDE * tiles)
    wide = gl.minimum(panels - part * BESIDE, BESIDE)
    panel = table + 4 * groups + 1 + part * BESIDE + inner % wide
    # the table may be of int32, and what is read of it is multiplied by strides
    group = gl.load(panel).to(gl.int64)
    end = gl.load(table + gl.minimum(group, groups - 1) + 1).to(gl.int64)
    return group, gl.load(panel + panels).to(gl.int64), end, inner // wide


@gluon.jit
def fetch(
    a, b, table, depth, columns, groups, panels, tiles, a_tiles, b_tiles, full, empty,
    TURNED: gl.constexpr, BESIDE: gl.constexpr,
):  # fmt: skip
    """Fill stages with 128 rows of a and COLUMNS of b."""
    steps = (depth + 127) // 128
    at = 0
    for tile in range(gl.program_id(0), panels * tiles, gl.num_programs(0)):
        group, first, _end, across = place(tile, table, groups, panels, tiles, BESIDE)
        if group < groups:
            row = first.to(gl.int32)
            matrix = group.to(gl.int32)
            for step in range(steps):
                slot, arrived = to_fill(full, empty, at, (128 + COLUMNS) * 128)
                copy_tile(a, [row, step * 128], arrived, a_tiles.index(slot))
                if TURNED:
                    b_row = (matrix * steps + step) * columns + across * COLUMNS
                    copy_tile(b, [b_row, 0], arrived, b_tiles.index(slot))
                else:
                    b_row = matrix * columns + across * COLUMNS
                    copy_tile(b, [b_row, step * 128], arrived, b_tiles.index(slot))
                at += 1


@gluon.jit
def finished(
    total, a_scale, b_scale, bias, bias_scales, group, first, end, column, columns,
    bias_group, bias_column, bias_scale, SCALING: gl.constexpr,
):  # fmt: skip
    """Sums times the scales that all of them share, and the bias."""
    row = first + gl.arange(0, 64, gl.SliceLayout(1, SUMS))
    j = column + gl.arange(0, 128, gl.SliceLayout(0, SUMS))
    if SCALING == "group":
        total = scaled(total, gl.load(a_scale + group), gl.load(b_scale + group))
    elif SCALING == "row":
        of_row = gl.load(a_scale + row, mask=row < end, other=0.0)
        of_column = gl.load(b_scale + group * columns + j, mask=j < columns, other=0.0)
        total = scaled(total, of_row[:, None], of_column[None, :])
    if bias is not None:
        added = gl.load(bias + group * bias_group + j * bias_column, mask=j < columns, other=0.0).to(gl.float32)
        if bias_scales is not None:
            total += gl.load(bias_scales + row * bias_scale, mask=row < end, other=0.0)[:, None] * added[None, :]
        else:
            total += added[None, :]
    return total


@gluon.jit
def multiply(
    a_scale, b_scale, bias, bias_scales, table, out, rows, depth, columns, groups, panels, tiles, out_row, out_column,
    bias_group, bias_column, bias_scale, a_tiles, b_tiles, full, empty,
    PART: gl.constexpr, SCALING: gl.constexpr, TURNED: gl.constexpr, BESIDE: gl.constexpr,
):  # fmt: skip
    """128 columns of each tile, those of one square block of b."""
    steps = (depth + 127) // 128
    down = ((depth if TURNED else columns) + 127) // 128
    wide = ((columns if TURNED else depth) + 127) // 128
    at = 0
    for tile in range(gl.program_id(0), panels * tiles, gl.num_programs(0)):
        group, first, end, across = place(tile, table, groups, panels, tiles, BESIDE)
        column = across * COLUMNS + PART * 128
        if group >= groups:
            zero = gl.zeros([64, 128], gl.float32, SUMS)
            write(out, zero, first, rows, column, columns, out_row, out_column)
            write(out, zero, first + 64, rows, column, columns, out_row, out_column)
        else:
            upper = gl.zeros([64, 128], gl.float32, SUMS)
            lower = gl.zeros([64, 128], gl.float32, SUMS)
            row = first + gl.arange(0, 64, gl.SliceLayout(1, SUMS))
            of_rows = a_scale + row * steps
            # a column past the last has a block that may be past the scales, and is stored nowhere
            block = gl.minimum(column // 128, (columns + 127) // 128 - 1)
            of_blocks = b_scale + group * down * wide + (block if TURNED else block * wide)
            for step in range(steps):
                slot = at % STAGES
                if SCALING == "block":
                    upper_scale = gl.load(of_rows + step, mask=row < end, other=0.0)
                    lower_scale = gl.load(of_rows + 64 * steps + step, mask=row + 64 < end, other=0.0)
                    of_block = gl.load(of_blocks + (step * wide if TURNED else step))
                mbarrier.wait(full.index(slot), (at // STAGES) & 1)
                product = multiplied(a_tiles.index(slot), b_tiles.index(slot), 0, PART)
                if SCALING == "block":
                    upper += product * gl.minimum(upper_scale * of_block, LARGEST)[:, None]
                else:
                    upper += product
                product = multiplied(a_tiles.index(slot), b_tiles.index(slot), 64, PART)
                mbarrier.arrive(empty.index(slot), count=1)
                if SCALING == "block":
                    lower += product * gl.minimum(lower_scale * of_block, LARGEST)[:, None]
                else:
                    lower += product
                at += 1
            upper = finished(
                upper, a_scale, b_scale, bias, bias_scales, group, first, end, column, columns,
                bias_group, bias_column, bias_scale, SCALING,
            )  # fmt: skip
            lower = finished(
                lower, a_scale, b_scale, bias, bias_scales, group, first + 64, end, column, columns,
                bias_group, bias_column, bias_scale, SCALING,
            )  # fmt: skip
            write(out, upper, first, end, column, columns, out_row, out_column)
            write(out, lower, first + 64, end, column, columns, out_row, out_column)


@gluon.jit
def hopper_rows(
    a, a_scale, b, b_scale, bias, bias_scales, table, out, rows, depth, columns, groups, panels, tiles,
    out_row, out_column, bias_group, bias_column, bias_scale,
    SCALING: gl.constexpr, TURNED: gl.constexpr, BESIDE: gl.constexpr, EVEN: gl.constexpr = False,
):  # fmt: skip
    """out[r, j] = sum over i of a[r, i] b[g, i, j], and the bias; codes by descriptors of two axes.

    a         [M, I]
    b         [G J, I]; TURNED (dgrad) panels [G ceil(I / 128) J, 128]
    a_scale   "block": fp32 [M, ceil(I / 128)]; "row": [M]; "group": [G]
    b_scale   "block": square blocks of b's plane; "row": [G, J]; "group": [G]
    """
    if EVEN:  # see formats.multiple_of_16
        columns = columns // 16 * 16
        out_row = out_row // 16 * 16
        bias_group = bias_group // 16 * 16
    a_tiles = gl.allocate_shared_memory(a.dtype, [STAGES, 128, 128], a.layout)
    b_tiles = gl.allocate_shared_memory(b.dtype, [STAGES, COLUMNS, 128], b.layout)
    full, empty = ring(STAGES, 2)
    gl.warp_specialize(
        [
            (multiply, (
                a_scale, b_scale, bias, bias_scales, table, out, rows, depth, columns, groups, panels, tiles,
                out_row, out_column, bias_group, bias_column, bias_scale, a_tiles, b_tiles, full, empty,
                0, SCALING, TURNED, BESIDE,
            )),
            (multiply, (
                a_scale, b_scale, bias, bias_scales, table, out, rows, depth, columns, groups, panels, tiles,
                out_row, out_column, bias_group, bias_column, bias_scale, a_tiles, b_tiles, full, empty,
                1, SCALING, TURNED, BESIDE,
            )),
            (fetch, (
                a, b, table, depth, columns, groups, panels, tiles, a_tiles, b_tiles, full, empty, TURNED, BESIDE,
            )),
        ],
        [4, 1],
        REGISTERS,
    )  # fmt: skip

"""Which rows a program has: panels of 128 rows of one group, found on the device.

The table of ragged rows, int64, or int32 for a framework that has no wider integers: starts [G + 1] (the last one is
the sum), then for blocks of 128, 32 and 16 rows the packed index of each group's first block [3, G], then of each panel
its group [P] (G where it has none) and its first row [P]. The panels without a group follow the others and cover the
rows past the sum.
"""

from __future__ import annotations

import triton
import triton.language as tl

from octavo_triton.kernels.device import device_function

PANEL = tl.constexpr(128)


@triton.jit
def index_rows(
    sizes, table, bounded, status, rows, groups, panels, GROUPS: tl.constexpr, CHUNK: tl.constexpr, FLAG: tl.constexpr
):
    """Write the table of group `sizes` for `rows` rows, and the sizes cut to bounds; FLAG: tell `status`.

    bounded   [G], or None: nobody asks
    """
    group = tl.arange(0, GROUPS)
    real = group < groups
    given = tl.load(sizes + group, mask=real, other=0).to(tl.int64)
    wanted = tl.minimum(tl.maximum(given, 0), rows)
    ends = tl.cumsum(wanted, 0)
    starts = tl.minimum(ends - wanted, rows)
    ends = tl.minimum(ends, rows)
    size = ends - starts
    total = tl.max(ends, 0)
    count = (size + PANEL - 1) // PANEL
    last = tl.cumsum(count, 0)
    if tl.program_id(0) == 0:
        tl.store(table + group, starts, mask=real)
        tl.store(table + groups, total)
        first = table + groups + 1
        tl.store(first + group, last - count, mask=real)
        of_32 = (size + 31) // 32
        tl.store(first + groups + group, tl.cumsum(of_32, 0) - of_32, mask=real)
        of_16 = (size + 15) // 16
        tl.store(first + 2 * groups + group, tl.cumsum(of_16, 0) - of_16, mask=real)
        if bounded is not None:
            tl.store(bounded + group, size, mask=real)
        if FLAG:
            wrong = tl.max((size != given).to(tl.int32), 0)
            if wrong != 0:
                tl.atomic_or(status, 1)
    panel = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    used = tl.max(last, 0)
    owner = tl.sum(((last[None, :] <= panel[:, None]) & real[None, :]).to(tl.int32), 1)
    mine = group[None, :] == owner[:, None]
    row = tl.sum(tl.where(mine, starts[None, :] + (panel[:, None] - (last - count)[None, :]) * PANEL, 0), 1)
    row = tl.where(owner < groups, row, total + (panel - used) * PANEL)
    of_panels = table + 4 * groups + 1
    tl.store(of_panels + panel, owner.to(tl.int64), mask=panel < panels)
    tl.store(of_panels + panels + panel, tl.minimum(row, rows), mask=panel < panels)


@device_function
def word_of(at):
    """A word of the table as int64: it is multiplied by strides."""
    return tl.load(at).to(tl.int64)


@device_function
def tile_of_panel(columns, BACKWARDS: tl.constexpr = False):
    """(panel, tile of 128 columns) of this program: columns first, so that neighbours read whole rows together.

    BACKWARDS   from the last tile to the first: a second pass finds what the first one read last in the L2 cache
    """
    across = tl.maximum((columns + PANEL - 1) // PANEL, 1)
    program = tl.num_programs(0) - 1 - tl.program_id(0) if BACKWARDS else tl.program_id(0)
    return program // across, program % across


@device_function
def panel_rows(table, panel, groups, panels, matrix_rows, STACKED: tl.constexpr):
    """(group, first row of the panel, first row of the group, row after its last) of a panel; group G: of no group."""
    if STACKED:
        each = tl.maximum((matrix_rows + PANEL - 1) // PANEL, 1)
        group = (panel // each).to(tl.int64)
        start = group * matrix_rows
        return group, start + (panel % each) * PANEL, start, start + matrix_rows
    else:
        of_panels = table + 4 * groups + 1
        group = word_of(of_panels + panel)
        row = word_of(of_panels + panels + panel)
        owner = tl.minimum(group, groups - 1)
        return group, row, word_of(table + owner), word_of(table + owner + 1)


@device_function
def first_block(table, group, groups, matrix_rows, BLOCK: tl.constexpr, STACKED: tl.constexpr):
    """The packed index of a group's first block of BLOCK rows."""
    if STACKED:
        return group * ((matrix_rows + BLOCK - 1) // BLOCK)
    elif BLOCK == 128:
        return word_of(table + groups + 1 + group)
    elif BLOCK == 32:
        return word_of(table + 2 * groups + 1 + group)
    else:
        return word_of(table + 3 * groups + 1 + group)

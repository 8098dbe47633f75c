"""How a program of a quantizer holds a panel: runs of adjacent rows in one thread, columns side by side across threads.

Triton gives the columns of a tile to the threads of a warp, then the first rows to the remaining threads and to the
warps, and what is left to the registers of each thread. So the rows of a panel are loaded as rows 0, RUN, 2 RUN, ... of
it, then rows 1, RUN + 1, ...: as [RUN, runs, columns] a tile has a run in a thread, which finds maxima, sums and bytes
that lie side by side by itself.
"""

from __future__ import annotations

import triton.language as tl

from octavo_triton.kernels.device import device_function
from octavo_triton.kernels.panels import PANEL


@device_function
def rows_in_runs(RUN: tl.constexpr):
    """The rows of a panel [128], of all runs the first one, then of all runs the second one."""
    at = tl.arange(0, PANEL)
    return at % (PANEL // RUN) * RUN + at // (PANEL // RUN)


@device_function
def columns_of_tile(tile, WIDTH: tl.constexpr, BESIDE: tl.constexpr):
    """Columns [WIDTH] of a tile, BESIDE of them in a thread: else the kernel's widest access, one of bytes, decides."""
    return tl.max_contiguous(tile * WIDTH + tl.arange(0, WIDTH), BESIDE)


@device_function
def load_tile(pointers, inside):
    """A tile's values, 0 outside, all of them asked for before any is used.

    The assembler puts loads off until registers are free, and a multiprocessor has too few of these programs for others
    to work meanwhile. It moves no load past a barrier, though it may move arithmetic ahead of one.
    """
    stored = tl.load(pointers, mask=inside, other=0)
    tl.debug_barrier()
    return stored


@device_function
def store_turned(turned, codes, panel, tile, columns, RUN: tl.constexpr, WIDTH: tl.constexpr):
    """Codes [128, WIDTH] in runs as columns [P, C, 128]: the rows of one panel lie side by side."""
    row, column = tl.arange(0, PANEL)[None, :], tile * WIDTH + tl.arange(0, WIDTH)[:, None]
    side_by_side = tl.reshape(tl.permute(tl.reshape(codes, (RUN, PANEL // RUN, WIDTH)), (2, 1, 0)), (WIDTH, PANEL))
    to = turned + panel * columns * PANEL + (column * PANEL + row)
    tl.store(to, side_by_side, mask=(column < columns) & (row >= 0))

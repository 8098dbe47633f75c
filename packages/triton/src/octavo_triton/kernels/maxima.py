"""amax of parts of a tile, as int32 patterns of |x| (see `scales`).

bfloat16 stays two to a register, where one instruction finds the larger of each half.
"""

from __future__ import annotations

import triton
import triton.language as tl

from octavo_triton.kernels.device import COMPILED, device_function
from octavo_triton.kernels.formats import magnitudes


@triton.jit
def _larger_of_each(one, other):
    """The larger bfloat16 of each half of two registers, NaN where either is."""
    LARGER: tl.constexpr = "max.NaN.bf16x2 $0, $1, $2;"
    return tl.inline_asm_elementwise(LARGER, "=r,r,r", [one, other], dtype=tl.int32, is_pure=True, pack=1)


@device_function
def _pairs(stored, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """|x| of two neighbours in a row in one register: int32 [ROWS, WIDTH / 2] of bfloat16 [ROWS, WIDTH] as int16."""
    low, high = tl.split(tl.reshape(stored, (ROWS, WIDTH // 2, 2)))
    PAIR: tl.constexpr = "{ mov.b32 $0, {$1, $2}; and.b32 $0, $0, 0x7FFF7FFF; }"
    return tl.inline_asm_elementwise(PAIR, "=r,h,h", [low, high], dtype=tl.int32, is_pure=True, pack=1)


@device_function
def largest_across(stored, DTYPE: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """amax [ROWS, WIDTH / BLOCK] of BLOCK columns of each row of a tile [ROWS, WIDTH]."""
    if COMPILED and DTYPE == "bfloat16":
        pairs = tl.reshape(_pairs(stored, ROWS, WIDTH), (ROWS, WIDTH // BLOCK, BLOCK // 2))
        largest = tl.reduce(pairs, 2, _larger_of_each)
        return tl.maximum(largest << 16, largest & -0x10000)
    else:
        return tl.max(tl.reshape(magnitudes(stored, DTYPE), (ROWS, WIDTH // BLOCK, BLOCK)), 2)


@device_function
def largest_down(
    stored, DTYPE: tl.constexpr, RUN: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr
):
    """amax [ROWS / BLOCK, WIDTH] of BLOCK rows of each column of a tile [ROWS, WIDTH], whose rows are in runs."""
    BLOCKS: tl.constexpr = ROWS // BLOCK
    if COMPILED and DTYPE == "bfloat16":
        pairs = tl.reshape(_pairs(stored, ROWS, WIDTH), (RUN, ROWS // RUN, WIDTH // 2))
        of_runs = tl.reshape(tl.reduce(pairs, 0, _larger_of_each), (BLOCKS, BLOCK // RUN, WIDTH // 2))
        largest = tl.reduce(of_runs, 1, _larger_of_each)
        return tl.reshape(tl.join(largest << 16, largest & -0x10000), (BLOCKS, WIDTH))
    else:
        of_runs = tl.max(tl.reshape(magnitudes(stored, DTYPE), (RUN, ROWS // RUN, WIDTH)), 0)
        return tl.max(tl.reshape(of_runs, (BLOCKS, BLOCK // RUN, WIDTH)), 1)


@device_function
def largest_all(stored, DTYPE: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """amax of a tile [ROWS, WIDTH]."""
    if COMPILED and DTYPE == "bfloat16":
        largest = tl.reduce(tl.ravel(_pairs(stored, ROWS, WIDTH), can_reorder=True), 0, _larger_of_each)
        return tl.maximum(largest << 16, largest & -0x10000)
    else:
        return tl.max(tl.max(magnitudes(stored, DTYPE), 1), 0)

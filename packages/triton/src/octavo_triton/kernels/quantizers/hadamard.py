"""The 16-point Hadamard transform along rows that NVFP4 puts before its column data (NVIDIA, arXiv 2509.25149, 4.2)."""

from __future__ import annotations

import triton.language as tl

from octavo_triton.kernels.device import device_function
from octavo_triton.kernels.formats import bits_of, float_from, from_stored, rounded_to_bfloat16


@device_function
def butterflies(value, STRIDE: tl.constexpr, RUNS: tl.constexpr, COLUMNS: tl.constexpr):
    """a + b and a - b of rows that are STRIDE apart, of [16, RUNS, COLUMNS]."""
    pairs = tl.reshape(value, (8 // STRIDE, 2, STRIDE, RUNS, COLUMNS))
    low, high = tl.split(tl.permute(pairs, (0, 2, 3, 4, 1)))
    both = tl.permute(tl.join(low + high, low - high), (0, 4, 1, 2, 3))
    return tl.reshape(both, (16, RUNS, COLUMNS))


@device_function
def hadamard(stored, DTYPE: tl.constexpr, RUNS: tl.constexpr, COLUMNS: tl.constexpr):
    """Runs of 16 rows [16, RUNS, COLUMNS] of loaded values, rounded to bfloat16 before and after; its bits as int16."""
    if DTYPE != "bfloat16":
        stored = rounded_to_bfloat16(from_stored(stored, DTYPE))
    # bit i: row i of each run changes its sign
    negative = tl.full((16,), 0b1101_0111_1110_1000, tl.int32)
    flipped = ((negative >> tl.arange(0, 16)) & 1) << 31
    turned = float_from(bits_of(from_stored(stored, "bfloat16")) ^ flipped[:, None, None])
    turned = butterflies(turned, 1, RUNS, COLUMNS)
    turned = butterflies(turned, 2, RUNS, COLUMNS)
    turned = butterflies(turned, 4, RUNS, COLUMNS)
    turned = butterflies(turned, 8, RUNS, COLUMNS)
    return rounded_to_bfloat16(turned * 0.25)

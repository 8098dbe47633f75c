"""The 16-point Hadamard transform along rows that NVFP4 puts before its column data (NVIDIA, arXiv 2509.25149, 4.2)."""

from __future__ import annotations

import triton.language as tl

from octavo_triton.kernels.device import device_function
from octavo_triton.kernels.formats import float_from, to_bfloat16


@device_function
def butterflies(value, RUNS: tl.constexpr, STRIDE: tl.constexpr, COLUMNS: tl.constexpr):
    """a + b and a - b of rows that are STRIDE apart, of [RUNS, 16, COLUMNS]."""
    pairs = tl.reshape(value, (RUNS, 8 // STRIDE, 2, STRIDE, COLUMNS))
    low, high = tl.split(tl.permute(pairs, (0, 1, 3, 4, 2)))
    both = tl.permute(tl.join(low + high, low - high), (0, 1, 4, 2, 3))
    return tl.reshape(both, (RUNS, 16, COLUMNS))


@device_function
def hadamard(value, RUNS: tl.constexpr, COLUMNS: tl.constexpr):
    """Runs of 16 rows [RUNS, 16, COLUMNS], rounded to bfloat16 before and after."""
    # bit i: row i of each run changes its sign
    negative = tl.full((16,), 0b1101_0111_1110_1000, tl.int32)
    flipped = ((negative >> tl.arange(0, 16)) & 1) << 31
    turned = float_from(to_bfloat16(value) ^ flipped[None, :, None])
    turned = butterflies(turned, RUNS, 1, COLUMNS)
    turned = butterflies(turned, RUNS, 2, COLUMNS)
    turned = butterflies(turned, RUNS, 4, COLUMNS)
    turned = butterflies(turned, RUNS, 8, COLUMNS)
    return float_from(to_bfloat16(turned * 0.25))

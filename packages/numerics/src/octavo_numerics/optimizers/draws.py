"""Stochastic rounding of an optimizer's arrays, with bits that depend on the step and the position alone.

An array of any number of axes counts as rows of its last one. Element c of row r takes 16 bits of Philox4x32-10 with
the seed's two words as key and the counter (r, c // 8, step, 2^31 + 4 * tensor + stream): word (c mod 8) // 2, the low
16 bits when c is even. The quantizers' counters end in a group number below 2^31, so one seed may serve both.

    stream 0   the master weight
    stream 1   the first moment
    stream 2   the second moment
"""

from __future__ import annotations

import ml_dtypes
import numpy as np
import numpy.typing as npt

from octavo_numerics.casts import F32, round_bfloat16
from octavo_numerics.philox import philox4x32, split_seed

U16 = npt.NDArray[np.uint16]

MASTER, FIRST_MOMENT, SECOND_MOMENT = range(3)
_MOST_TENSORS = 1 << 29
_PER_COUNTER = 8


def rows_and_columns(shape: tuple[int, ...]) -> tuple[int, int]:
    """An array's rows of its last axis, and their length; a scalar is one row of one element."""
    columns = shape[-1] if shape else 1
    return int(np.prod(shape[:-1], dtype=np.int64)), columns


def rounding_bits(shape: tuple[int, ...], stream: int, *, seed: int, step: int, tensor: int) -> U16:
    """The 16 random bits of each element of an array of this shape; ValueError for a tensor past 2^29 - 1."""
    if not 0 <= tensor < _MOST_TENSORS:
        raise ValueError(f"tensor is {tensor}; the numbers of an optimizer's tensors are 0 to 2^29 - 1")
    rows, columns = rows_and_columns(shape)
    row = np.arange(rows, dtype=np.uint32)[:, None]
    block = np.arange(-(-columns // _PER_COUNTER), dtype=np.uint32)[None, :]
    step_word = np.full((1, 1), step & 0xFFFFFFFF, dtype=np.uint32)
    last = np.full((1, 1), (1 << 31) + 4 * tensor + stream, dtype=np.uint32)
    words = np.stack(philox4x32((row, block, step_word, last), split_seed(seed)), axis=-1)
    # Little-endian words put the low 16 bits first, whatever the host's byte order.
    halves = words.astype("<u4").view("<u2").astype(np.uint16).reshape(rows, _PER_COUNTER * block.size)
    return halves[:, :columns].reshape(shape)


def round_stochastic(values: F32, random: U16) -> npt.NDArray[ml_dtypes.bfloat16]:
    """fp32 `values` as bf16: the neighbour further from zero is taken where the lower 16 bits of the pattern and the
    16 random bits carry, and so with the probability that makes the expectation the value itself.

    What is not finite is rounded to nearest: infinities stay, NaN is 0x7FC0.
    """
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    carried = ((bits + random) & np.uint32(0xFFFF0000)).view(np.float32)
    rounded = np.where(np.isfinite(values), carried.reshape(values.shape), round_bfloat16(values).reshape(values.shape))
    return rounded.astype(ml_dtypes.bfloat16)

"""Moments of an optimizer in 8 bits: codes with three mantissa bits, relative to the largest value of their block.

The upper 11 bits of a non-negative fp32 pattern, 8 of exponent and 3 of mantissa, count through numbers whose distance
is at most an eighth of them. A block of 1x128 elements, the last one of a row partial, stores the count `top` of its
largest element, rounded up, and each element how far it is below:

    unsigned   1 to 255 for counts top - 254 to top, so 31.75 binades; a positive value below them is 1, and not 0: a
               second moment of 0 would divide a first one that is not
    signed     1 to 127 for counts top - 126 to top, 15.75 binades, and the sign as bit 7; what is below them is 0

Code 0 is zero, without a sign. Rounding is stochastic to 16 bits, the pattern's lower 20 bits and the random ones
carrying, because nearest rounding would keep a second moment where it is: it changes by 1 - beta2 of itself
in a step, 0.001 by default, and half a step of the code is 0.03 to 0.06. The stored value's expectation is the value,
to 2^-16 of a step of the code.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from octavo_numerics.casts import F32, U8
from octavo_numerics.optimizers.draws import U16, rows_and_columns

BLOCK = 128
"""Consecutive elements of the last axis that share a top."""

NOT_FINITE = -1
"""The top of a block with an infinite or NaN element: all of it decodes to NaN."""

_SHIFT = 20
_LARGEST_TOP = 0x7F7
_INFINITY = 0x7F800000
_SIGN = 0x80


@dataclass(frozen=True, slots=True, eq=False)
class BlockState:
    """A moment in 8 bits.

    codes   uint8, the parameter's shape
    tops    int32 [..., ceil(last axis / 128)]
    signed  bit 7 of a code is a sign
    """

    codes: U8
    tops: npt.NDArray[np.int32]
    signed: bool

    @property
    def levels(self) -> int:
        """The largest code's magnitude, which stands for the block's top."""
        return 127 if self.signed else 255


def zero_blocks(shape: tuple[int, ...], signed: bool) -> BlockState:
    """The state of zeros."""
    tops = (*shape[:-1], -(-rows_and_columns(shape)[1] // BLOCK))
    return BlockState(np.zeros(shape, np.uint8), np.zeros(tops, np.int32), signed)


def encode_blocks(values: F32, signed: bool, random: U16) -> BlockState:
    """The state nearest to fp32 `values` as `random`, 16 bits for each, rounds them. A negative value that is to be
    unsigned counts as its magnitude."""
    empty = zero_blocks(values.shape, signed)
    bits = _in_blocks(np.abs(values).view(np.uint32).astype(np.int64), values.shape)
    largest = bits.max(axis=-1, initial=0)
    finite = (largest < _INFINITY)[..., None]
    top = np.minimum((largest + (1 << _SHIFT) - 1) >> _SHIFT, _LARGEST_TOP)[..., None]
    carried = (bits + (_in_blocks(random.astype(np.int64), values.shape) << (_SHIFT - 16))) >> _SHIFT
    codes = np.minimum(carried, top) - top + empty.levels
    codes = np.where(codes < 1, 0 if signed else 1, codes)
    codes = _out_of_blocks(np.where(finite & (bits > 0), codes, 0), values.shape)
    if signed:
        codes = codes | np.where(np.signbit(values) & (codes > 0), _SIGN, 0)
    tops = np.where(finite, top, NOT_FINITE).astype(np.int32).reshape(empty.tops.shape)
    return BlockState(codes.astype(np.uint8), tops, signed)


def decode_blocks(state: BlockState) -> F32:
    """The fp32 values that a state stands for."""
    shape = state.codes.shape
    rows, columns = rows_and_columns(shape)
    top = np.repeat(state.tops.reshape(rows, -(-columns // BLOCK)).astype(np.int64), BLOCK, axis=1)[
        :, :columns
    ].reshape(shape)
    codes = state.codes.astype(np.int64)
    magnitude = codes & (_SIGN - 1) if state.signed else codes
    bits = np.where(magnitude > 0, (magnitude - state.levels + top) << _SHIFT, 0).astype(np.uint32)
    if state.signed:
        bits |= ((codes & _SIGN) << 24).astype(np.uint32)
    return np.where(top == NOT_FINITE, np.float32(np.nan), bits.view(np.float32))


def block_state_bound(values: F32, signed: bool) -> npt.NDArray[np.float64]:
    """What |decode_blocks(encode_blocks(values)) - values| is at most, for finite values with normal tops.

    A step of the code, an eighth of the largest power of two up to the value; or, below the least code of the block,
    that code's value. The least code is 6 counts and 15 (signed) or 31 (unsigned) binades below the top, and the top at
    most a count above the largest value; this is worst for a top of 9/8, which has 11/16 below it, and a largest value
    just above 1.
    """
    wide = np.abs(values.astype(np.float64))
    amax = _out_of_blocks(_in_blocks(wide, values.shape).max(axis=-1, initial=0, keepdims=True), values.shape)
    least = amax * (11 / 16) * 2.0 ** (-15 if signed else -31)
    bound: npt.NDArray[np.float64] = np.maximum(wide / 8, least)
    return bound


def _in_blocks(values: npt.NDArray[Any], shape: tuple[int, ...]) -> npt.NDArray[Any]:
    """[rows, blocks, 128] with zeros past the last column."""
    rows, columns = rows_and_columns(shape)
    padded = np.zeros((rows, -(-columns // BLOCK) * BLOCK), values.dtype)
    padded[:, :columns] = values.reshape(rows, columns)
    return padded.reshape(rows, -(-columns // BLOCK), BLOCK)


def _out_of_blocks(values: npt.NDArray[Any], shape: tuple[int, ...]) -> npt.NDArray[Any]:
    rows, columns = rows_and_columns(shape)
    whole = np.broadcast_to(values, (*values.shape[:2], BLOCK))
    return whole.reshape(rows, values.shape[1] * BLOCK)[:, :columns].reshape(shape)

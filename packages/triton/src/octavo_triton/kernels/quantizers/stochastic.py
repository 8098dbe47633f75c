"""Stochastic rounding to E2M1, from random bits that depend on an element's position alone."""

from __future__ import annotations

import triton.language as tl

from octavo_triton.kernels.device import device_function
from octavo_triton.kernels.formats import bits_of, float_from, from_code


@device_function
def draws(seed, outer, block, group, number, OUTER: tl.constexpr, BLOCKS: tl.constexpr):
    """16 random bits for each element of blocks of 16: int32 [OUTER, BLOCKS, 16].

    outer, block, group   int32 [OUTER], [BLOCKS] and a scalar; `number` is 8 * operand + 2 * stream

    Philox4x32-10 with the counter (outer, block, number + half, group): element i takes half i // 8, of it word
    (i mod 8) // 2, and of that the low 16 bits where i is even.
    """
    zero = tl.full((OUTER, BLOCKS, 2), 0, tl.int32)
    half = tl.arange(0, 2)[None, None, :] + number
    counter = zero + outer[:, None, None], zero + block[None, :, None], zero + half, zero + group
    w0, w1, w2, w3 = tl.philox(seed, counter[0], counter[1], counter[2], counter[3])
    # the last axes are the word's upper and lower bit
    words = tl.join(tl.join(w0, w2), tl.join(w1, w3))
    bits = tl.join(words & 0xFFFF, words >> 16).to(tl.int32)
    return tl.reshape(bits, (OUTER, BLOCKS, 16))


@device_function
def to_e2m1(value, random):
    """Codes of fp32 values: up to the next one iff floor(2^16 (v - lo) / (hi - lo)) + random >= 2^16."""
    bits = bits_of(value)
    magnitude = float_from(tl.minimum(bits & 0x7FFFFFFF, 0x40C00000))  # at most 6
    low = tl.where(magnitude < 1.0, (magnitude * 2.0).to(tl.int32), (bits_of(magnitude) >> 22) - 252)
    # 2^16 / (hi - lo) is exact: steps are 0.5, 1 and 2
    inverse_step = tl.where(low < 4, 131072.0, tl.where(low < 6, 65536.0, 32768.0))
    fraction = ((magnitude - from_code(low, "e2m1")) * inverse_step).to(tl.int32)
    return (low + (fraction + random >= 65536).to(tl.int32)) | ((bits >> 28) & 0x8)

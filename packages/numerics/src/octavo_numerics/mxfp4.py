"""round_mxfp4: weights to the values that an MXFP4 file has for them.

A block is 32 elements along K, the last of a row partial. Its E8M0 exponent byte b is the smallest with
2^(b-127) >= fl(amax fl(1 / 6)), at most 252, and each element becomes fl(e2m1(fl(x 2^(127-b))) 2^(b-127)), which is
exact. The scale is rounded up, so nothing saturates but magnitudes past 7 * 2^125, whose b is 252 because the 4 of the
next byte would be 2^128. A block with an infinity or a NaN has b = 0xFF and is NaN; a zero block has b = 0.

The published writers agree on E2M1 and differ in how they round the scale: OCP's rule takes floor(log2(amax)) - 2,
compressed-tensors rounds amax to one bit after the first and then does the same, ModelOpt and the writer of gpt-oss
round amax / 6 up, as here. All of them leave the values of an MXFP4 file as they are. Let the largest magnitude of a
block be c 2^k. With c = 4 or 6 each rule gives k. With c = 3, 2, 1.5, 1 or 0.5 each gives the power of two that makes 4
or 6 of it, under which all that E2M1 has up to c is in E2M1, too.

E4M3 codes of these values (`QuantizerSpec.mxfp4`; 128x128 blocks by BlockScaling's rule). Let 2^E be the power of two
in the largest magnitude, which is 1 or 1.5 times that. 448 / amax without its mantissa is then 2^(8-E), so that E4M3's
least number 2^-9 stands for u = 2^(E-17); where that scale is past 2^127, the largest, every value is a multiple of
2^-1 under 2^127. A block of 32 has 2^j u as its E8M0 scale. Its values are multiples of half of that, so with j >= 1
all are kept. Else round to nearest even makes 2 u of 1.5 u, u of 0.75 u, and 0 of what is u / 2 or less, with their
signs, and keeps the rest. The largest value lies in a block with 2^15 u or more, hence nothing is lost where the bytes
of blocks that are not zero are at most 14 apart.

What is left is MXFP4 again: with j <= 0 the values are 0, 1, 2, 3, 4 and 6 times u, E2M1's with the scale u. The
largest is kept, and with it u, so that quantizing the values of the codes changes nothing, and a file holds them.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from octavo.quantizer import Direction
from octavo_numerics import checks
from octavo_numerics.casts import F32, cast, decode
from octavo_numerics.groups import Groups, Units
from octavo_numerics.scales import canonical, e8m0_decode, mxfp4_scales

BLOCK = 32
"""Elements along K that share an E8M0 scale."""


@np.errstate(all="ignore")
def rounded_rows(x: F32, groups: Groups, direction: Direction) -> F32:
    """fp32 `x` [U, C] in blocks of 1x32 ("rowwise"), or of 32x1 that restart at each group, as values of MXFP4."""
    rows, width = (groups.each, BLOCK) if direction == "rowwise" else (groups.blocks(BLOCK), 1)
    units = Units(rows, width, x.shape[1])
    encode, byte = mxfp4_scales(units.maximum(np.abs(x)))
    codes = cast(x * units.spread(encode), "e2m1")
    return canonical(decode(codes, "e2m1") * units.spread(e8m0_decode(byte)))


def round_mxfp4(w: Any, direction: Direction = "rowwise") -> F32:
    """fp32 values of `w` in MXFP4: what `MXFP4Weights` multiplies wherever its E4M3 codes hold them.

    w           [G, N, K] stacked matrices, or one [N, K]; bfloat16, float16 or float32
    direction   "rowwise": blocks of 32 along the last axis; "columnwise": along rows, of weights that lie as [G, K, N]

    Raises ValueError for other arrays.
    """
    checks.check_subnormals()
    array = checks.check_input(w, "w")
    way = checks.check_direction(direction)
    groups = Groups(checks.sizes_for(array, None))
    rows = checks.to_fp32(array).reshape(groups.rows, array.shape[-1])
    return rounded_rows(rows, groups, way).reshape(array.shape)

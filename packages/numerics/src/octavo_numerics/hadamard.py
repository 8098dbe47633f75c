"""The 16-point Hadamard transform of column operands, with its fixed signs.

H is Sylvester's matrix / 4, so that H H^T = I; both operands of wgrad are transformed, and the product needs no
inverse. Source: NVIDIA, "Pretraining Large Language Models with NVFP4" (arXiv 2509.25149), section 4.2; signs and
the order of the fp32 operations are Octavo's (docs/numerics).
"""

from __future__ import annotations

import numpy as np

from octavo.quantizer import HADAMARD_SIZE
from octavo_numerics.casts import F32, round_bfloat16

SIGNS: F32 = np.array([1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1], dtype=np.float32)
"""Factor of row i of each run of 16 rows."""


@np.errstate(all="ignore")
def hadamard(x: F32) -> F32:
    """Transform each run of 16 rows of fp32 `x` [R, C], R a multiple of 16; the result holds bfloat16 values.

    The input is rounded to bfloat16, multiplied by the signs, put through fp32 butterflies of stride 1, 2, 4 and 8
    (a + b, a - b), times 0.25, and rounded to bfloat16 once.
    """
    rows, cols = x.shape
    if rows % HADAMARD_SIZE:
        raise ValueError(f"x has {rows} rows; the transform takes multiples of {HADAMARD_SIZE}, so pad with zero rows")
    runs = rows // HADAMARD_SIZE
    values = round_bfloat16(x).reshape(runs, HADAMARD_SIZE, cols) * SIGNS[:, None]
    for stride in (1, 2, 4, 8):
        pairs = values.reshape(runs, HADAMARD_SIZE // (2 * stride), 2, stride, cols)
        first, second = pairs[:, :, 0], pairs[:, :, 1]
        values = np.stack([first + second, first - second], axis=2)
    return round_bfloat16(values.reshape(rows, cols) * np.float32(0.25))

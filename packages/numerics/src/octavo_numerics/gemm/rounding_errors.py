"""How far the rounding of a result, and those of a sum, can be off; `error_bound` derives the constants."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from octavo.formats import DType

Accumulation = Literal["fp32", "hopper_bf16", "hopper_fp8_promoted", "hopper_fp8"]
"""How a GEMM sums; what a backend's capability card states.

fp32                 fp32 sums, fused or not, in any order
hopper_bf16          bf16 products on Hopper's tensor cores
hopper_fp8_promoted  FP8 products, promoted to fp32 at least every 128 along K
hopper_fp8           FP8 products, promoted likewise unless the recipe's `fast_accumulation` lets this GEMM do without
"""

UNDERFLOW = 2.0**-150
"""What a subnormal fp32 product is off by at most."""
_PROMOTION = 128
_RHO_FP32 = 0.4247 * 2.0**-24
_ALPHA_PROMOTED = 1.9e-4


@dataclass(frozen=True, slots=True)
class Output:
    """Of one dtype: the largest relative error of a rounding, its root mean square, and the ends of its range."""

    unit: float
    rho: float
    subnormal: float
    largest: float


OUTPUTS: dict[DType, Output] = {
    "bfloat16": Output(2.0**-8, 1.66e-3, 2.0**-133, 2.0**128 * (1 - 2.0**-8)),
    "float16": Output(2.0**-11, 2.07e-4, 2.0**-24, 65504.0),
    "float32": Output(2.0**-24, 0.0, 2.0**-149, 2.0**128 * (1 - 2.0**-24)),
}


def accumulation_error(accumulation: Accumulation, k: int) -> tuple[float, float]:
    """(c, alpha) of a sum of `k` products."""
    if accumulation == "fp32":
        return 4 * math.sqrt(k) * 2.0**-24, _RHO_FP32 * math.sqrt(k + 1)
    if accumulation == "hopper_bf16":
        return (math.ceil(k / 16) + 1) * 2.0**-23, math.hypot(1.2e-9 * k, 3.5e-7)
    if accumulation == "hopper_fp8_promoted":
        return 2.0**-9, _ALPHA_PROMOTED
    return max(2.0**-8 * k / _PROMOTION, 2.0**-9), max(2.6e-5 * math.sqrt(k), _ALPHA_PROMOTED)

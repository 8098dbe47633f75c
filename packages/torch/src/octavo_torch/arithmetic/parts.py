"""fp32 as a sum of bf16, by which tensor cores multiply it exactly."""

from __future__ import annotations

import torch
from torch import Tensor

from octavo_torch.arithmetic.casts import bits_of, float_from

_UPPER_HALF = -0x10000  # of an fp32 value's bits, those of bf16


def bf16_parts(values: Tensor) -> list[Tensor]:
    """bf16 tensors whose sum is `values`, the largest first: one where they are bf16, else three of 8 bits each.

    What is infinite or NaN is in the first alone. Bits are cut off and not rounded, because torch.compile leaves out a
    conversion to bf16 whose result it goes on with in fp32, and then nothing was left for the other parts.
    """
    if values.dtype is torch.bfloat16:
        return [values]
    values = values.float()
    first = float_from(bits_of(values) & _UPPER_HALF)
    rest = torch.nan_to_num(values - first, nan=0.0)  # infinity - infinity
    second = float_from(bits_of(rest) & _UPPER_HALF)
    return [first.bfloat16(), second.bfloat16(), (rest - second).bfloat16()]

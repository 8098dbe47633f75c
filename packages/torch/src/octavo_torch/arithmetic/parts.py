"""fp32 as a sum of bf16, by which tensor cores multiply it exactly."""

from __future__ import annotations

import torch
from torch import Tensor

PARTS = 3
"""Of fp32: each has the next 8 of its 24 bits."""


def bf16_parts(values: Tensor) -> list[Tensor]:
    """bf16 tensors whose sum is `values`, the largest first: one where they are bf16, else three.

    What is infinite or NaN is in the first alone.
    """
    if values.dtype is torch.bfloat16:
        return [values]
    parts, rest = [values.bfloat16()], values.float()
    for _ in range(PARTS - 1):
        rest = torch.nan_to_num(rest - parts[-1], nan=0.0, posinf=0.0, neginf=0.0)
        parts.append(rest.bfloat16())
    return parts

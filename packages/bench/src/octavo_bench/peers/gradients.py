"""How far gradients of another library are from gradients of the same layer."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

FARTHEST = 2.0**-4
"""By norm, of gradients in bf16: another order of sums, and a rounding each."""


def distance(theirs: Sequence[Tensor], ours: Sequence[Tensor]) -> float:
    """The largest norm of a difference over the norm of ours; of zeros, over the least normal fp32 number. NaN if any
    gradient has one."""
    tiny = torch.finfo(torch.float32).tiny
    each = [
        torch.linalg.vector_norm((a - b).float()) / torch.linalg.vector_norm(b.float()).clamp_min(tiny)
        for a, b in zip(theirs, ours, strict=True)
    ]
    # Python's max may pass a NaN over
    return float(torch.stack(each).max())

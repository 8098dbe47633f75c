"""Functions of single fp32 values whose bits do not depend on where in an array a value stands.

On a CPU torch computes most of an array in vectors and its last values one by one, by another approximation of exp: an
ulp of difference, at places that depend on the number of rows and on the processor's vectors. Experts over ranks, which
have other rows than one process, would then have other bits. So on a CPU fp64 is rounded once, where that ulp is lost;
a GPU's threads all compute alike.
"""

from __future__ import annotations

import torch
from torch import Tensor


def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + exp(-x)) of fp32 values, fp32."""
    return torch.sigmoid(_wide(x)).float()


def silu(x: Tensor) -> Tensor:
    """x sigmoid(x) of fp32 values, fp32."""
    return torch.nn.functional.silu(_wide(x)).float()


def sqrt_softplus(x: Tensor) -> Tensor:
    """sqrt(log(1 + exp(x))) of fp32 values, fp32; where that underflows it is 0, and so is its slope. NaN stays."""
    softplus = torch.nn.functional.softplus(_wide(x))
    # the root of 0 has an infinite slope, and 0 times that is NaN
    nothing = softplus.float() == 0
    return torch.where(nothing, 0.0, torch.sqrt(torch.where(nothing, 1.0, softplus))).float()


def _wide(x: Tensor) -> Tensor:
    return x.double() if x.device.type == "cpu" else x

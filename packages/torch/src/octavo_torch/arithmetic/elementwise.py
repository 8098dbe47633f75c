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
    """sqrt(log(1 + exp(x))) of fp32 values, fp32. NaN stays."""
    # Below -15, softplus is an exponential in fp32. It underflows at half of the depth at which its root does, and the
    # slope of a root is infinite there.
    wide = _wide(x)
    small = wide < -15
    root = torch.sqrt(torch.nn.functional.softplus(torch.where(small, 0, wide)))
    return torch.where(small, torch.exp(0.5 * torch.where(small, wide, 0)), root).float()


def _wide(x: Tensor) -> Tensor:
    return x.double() if x.device.type == "cpu" else x

"""RMSNorm and LayerNorm of rows: computed in fp32, rounded once to the input's dtype.

    y = fl(fl(fl(x - mean) rstd) gamma) + beta, rstd = 1 / sqrt(mean((x - mean)^2) + epsilon)

RMSNorm has neither mean nor beta.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from octavo_registry.contract.cards import Norm
from octavo_torch.compiler.operators import Operators


class Normalized(NamedTuple):
    """y [M, C] in x's dtype; rstd fp32 [M], and mean fp32 [M] of LayerNorm."""

    y: Tensor
    rstd: Tensor
    mean: Tensor | None


def _normalize(x: Tensor, gamma: Tensor, beta: Tensor | None, norm: str, epsilon: float) -> list[Tensor]:
    centered, statistics = x.float(), []
    if norm == "layer":
        mean = centered.mean(-1)
        centered = centered - mean[:, None]
        # what the roundings of the sum and of the mean left over: x - mean may cancel
        centered = centered - centered.mean(-1, keepdim=True)
        statistics.append(mean)
    rstd = 1 / (centered.square().mean(-1) + epsilon).sqrt()
    y = centered * rstd[:, None] * gamma.float()
    return [(y if beta is None else y + beta.float()).to(x.dtype), rstd, *statistics]


def _normalize_fake(x: Tensor, gamma: Tensor, beta: Tensor | None, norm: str, epsilon: float) -> list[Tensor]:
    return [x.new_empty(x.shape)] + [
        x.new_empty(x.shape[:1], dtype=torch.float32) for _ in range(2 if norm == "layer" else 1)
    ]


_define = Operators("octavo_torch").define
_operator = _define(
    "normalize(Tensor x, Tensor gamma, Tensor? beta, str norm, float epsilon) -> Tensor[]", _normalize, _normalize_fake
)


def normalize(x: Tensor, gamma: Tensor, beta: Tensor | None, norm: Norm, epsilon: float) -> Normalized:
    """The rows of x [M, C], normalized, times gamma [C], plus beta [C] of LayerNorm."""
    y, rstd, *mean = _operator(x, gamma, beta, norm, epsilon)
    return Normalized(y, rstd, mean[0] if mean else None)

"""The function that computes a weight gradient: its type, and its form for interleaved gate and up rows."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from octavo_torch.arrays.grouped_tensor import GroupedTensor
from octavo_torch.arrays.interleaving import from_halves, to_halves

Codes = Tensor | GroupedTensor
"""An operand of a GEMM: quantized, or plain where the recipe is high precision."""


class WgradFunction(Protocol):
    """What a backend binds for "wgrad"."""

    def __call__(self, x: Any, dy: Any, sizes: Any, *, out: Tensor | None = None, accumulate: bool = False) -> Tensor:
        """dw [G, N, K] of x [M, K] and dy [M, N], written or added to `out`; sizes may be prepared by the backend."""


def interleaved_wgrad(wgrad: WgradFunction, block: int) -> WgradFunction:
    """`wgrad` of a weight in two halves as that of the interleaved weight; writing to `out` gives the same bits."""

    def run(x: Codes, dy: Codes, sizes: Any, *, out: Tensor | None = None, accumulate: bool = False) -> Tensor:
        if out is None:
            return from_halves(wgrad(x, dy, sizes), block)
        halves = to_halves(out, block) if accumulate else torch.empty(out.shape, dtype=out.dtype, device=out.device)
        wgrad(x, dy, sizes, out=halves, accumulate=accumulate)
        return out.copy_(from_halves(halves, block))

    return run

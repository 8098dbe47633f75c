"""The function that computes a weight gradient, for interleaved gate and up rows."""

from __future__ import annotations

import torch
from torch import Tensor

from octavo_torch.arrays.interleaving import from_halves, to_halves
from octavo_torch.arrays.sizes import Sizes
from octavo_torch.dispatch.layer import Matrix, WgradFunction


def interleaved_wgrad(wgrad: WgradFunction, block: int) -> WgradFunction:
    """`wgrad` of a weight in two halves as that of the interleaved weight; writing to `out` gives the same bits."""

    def run(x: Matrix, dy: Matrix, sizes: Sizes, /, *, out: Tensor | None = None, accumulate: bool = False) -> Tensor:
        if out is None:
            return from_halves(wgrad(x, dy, sizes), block)
        halves = to_halves(out, block) if accumulate else torch.empty(out.shape, dtype=out.dtype, device=out.device)
        wgrad(x, dy, sizes, out=halves, accumulate=accumulate)
        return out.copy_(from_halves(halves, block))

    return run

"""The function that computes a weight gradient, for interleaved gate and up rows."""

from __future__ import annotations

import torch
from torch import Tensor

from octavo_torch.arrays.interleaving import Interleave, from_halves, to_halves
from octavo_torch.arrays.sizes import Sizes
from octavo_torch.dispatch.layer import Matrix, WgradFunction


def interleaved_wgrad(wgrad: WgradFunction, block: int, exchange: Interleave | None) -> WgradFunction:
    """`wgrad` of a weight in two halves as that of the interleaved weight; writing to `out` gives the same bits.

    exchange   the backend's, for `to_halves` and `from_halves`
    """

    def run(x: Matrix, dy: Matrix, sizes: Sizes, /, *, out: Tensor | None = None, accumulate: bool = False) -> Tensor:
        if out is None:
            return from_halves(wgrad(x, dy, sizes), block, exchange)
        if accumulate:
            halves = to_halves(out, block, exchange)
        else:
            halves = torch.empty(out.shape, dtype=out.dtype, device=out.device)
        wgrad(x, dy, sizes, out=halves, accumulate=accumulate)
        return from_halves(halves, block, exchange, out)

    return run

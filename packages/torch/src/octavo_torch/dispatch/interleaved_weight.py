"""Adapts a plan's functions to an interleaved weight [G, 2 F, K], in which blocks of gate rows and up rows alternate.

If the backend serves such blocks, its own functions read and write the weight as it lies. Otherwise they are composed:
the weight is copied first, the gate half followed by the up half, and a gradient is interleaved afterwards. Either way
codes are of the two halves, and the bits are the same.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import wraps
from typing import cast

import torch
from torch import Tensor

from octavo_registry.contract.cards import Weight
from octavo_registry.contract.quantize import AnyBoundQuantize
from octavo_registry.dispatch.layer_plan import QuantizePlan, WgradPlan
from octavo_torch.arrays.grouped_tensor import Matrix, Rows
from octavo_torch.arrays.interleaving import Interleave, from_halves, to_halves
from octavo_torch.arrays.sizes import Sizes
from octavo_torch.dispatch.transposed_weight import GemmFunction, QuantizerFunction


def interleaved_quantizer(plan: QuantizePlan | None, block: int, weight: Weight) -> AnyBoundQuantize | None:
    """The backend's own quantizer of weights in such blocks, in the order `weight`; None if it has none."""
    if plan is None or not block or plan.bound.interleaved is None:
        return None
    return plan.bound.interleaved(block, weight)


def interleaved_wgrad(plan: WgradPlan, block: int, left_free: int) -> WgradPlan | None:
    """The plan with the backend's own gradient of weights in such blocks; None if it has none, or none that can leave
    `left_free` multiprocessors unused."""
    if not block or plan.bound.interleaved is None:
        return None
    bound = plan.bound.interleaved(block)
    return None if bound is None or (left_free and bound.limited is None) else replace(plan, bound=bound)


@dataclass(frozen=True, slots=True)
class Interleaving:
    """Composes functions of an interleaved weight from functions of its halves.

    block               how many gate rows, and how many up rows, follow each other
    interleave_halves   the backend's function for `to_halves` and `from_halves`; None: torch's operations
    """

    block: int
    interleave_halves: Interleave | None

    def to_halves(self, w: Tensor) -> Tensor:
        """`w` with the gate half first."""
        return to_halves(w, self.block, self.interleave_halves)

    def reading(self, run: GemmFunction) -> GemmFunction:
        """fprop or dgrad, by `run` of the halves; codes are of the halves already."""

        @wraps(run)
        def composed(rows: Rows, w: Matrix, sizes: Sizes, /, **how: object) -> Tensor:
            return run(rows, self.to_halves(w) if isinstance(w, Tensor) else w, sizes, **how)

        return cast(GemmFunction, composed)

    def writing(self, run: GemmFunction) -> GemmFunction:
        """wgrad, by `run` of the halves. Each element has the bits that `run` computes, also where it adds to `out`."""

        @wraps(run)
        def composed(
            x: Rows, dy: Rows, sizes: Sizes, /, *, out: Tensor | None = None, accumulate: bool = False
        ) -> Tensor:
            if out is None:
                return from_halves(run(x, dy, sizes), self.block, self.interleave_halves)
            halves = self.to_halves(out) if accumulate else torch.empty(out.shape, dtype=out.dtype, device=out.device)
            run(x, dy, sizes, out=halves, accumulate=accumulate)
            return from_halves(halves, self.block, self.interleave_halves, out)

        return cast(GemmFunction, composed)

    def quantizing(self, run: QuantizerFunction) -> QuantizerFunction:
        """A quantizer, by `run` of the halves, which is any function of a BoundQuantize."""

        @wraps(run)
        def composed(w: Tensor, sizes: None = None, /, **how: object) -> object:
            return run(self.to_halves(w), sizes, **how)

        return cast(QuantizerFunction, composed)

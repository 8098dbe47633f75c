"""Functions of plans that take and return an interleaved weight: [G, 2 F, K], gate and up rows in turns, in blocks.

Where the backend serves such blocks, its own functions read and write the weight as it lies. Elsewhere they are
composed: the weight is copied into two halves first, the gate half and then the up half, and a gradient is interleaved
afterwards. Either way codes are of the halves, and the bits are the same.
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
from octavo_torch.arrays.interleaving import Interleave, from_halves, to_halves
from octavo_torch.arrays.sizes import Sizes
from octavo_torch.dispatch.transposed_weight import GemmFunction, Operand, QuantizerFunction


def quantizer_in_turns(plan: QuantizePlan | None, block: int, weight: Weight) -> AnyBoundQuantize | None:
    """The backend's quantizer of such weights, whose matrices are as `weight` says; None where it has none."""
    if plan is None or not block or plan.bound.interleaved is None:
        return None
    return plan.bound.interleaved(block, weight)


def wgrad_in_turns(plan: WgradPlan, block: int, left: int) -> WgradPlan | None:
    """The plan of the backend's gradient of such weights; None where it has none, or none that leaves multiprocessors
    to others where `left` asks for that."""
    if not block or plan.bound.interleaved is None:
        return None
    bound = plan.bound.interleaved(block)
    return None if bound is None or (left and bound.limited is None) else replace(plan, bound=bound)


@dataclass(frozen=True, slots=True)
class Turns:
    """Composes functions of such weights from functions of their halves.

    block      rows that stay together
    exchange   the backend's, for `to_halves` and `from_halves`; None: torch's operations
    """

    block: int
    exchange: Interleave | None

    def to_halves(self, w: Tensor) -> Tensor:
        """`w` with the gate half first."""
        return to_halves(w, self.block, self.exchange)

    def reading(self, run: GemmFunction) -> GemmFunction:
        """`run`, fprop or dgrad; codes are of the halves already."""

        @wraps(run)
        def composed(rows: Operand, w: Operand, sizes: Sizes, /, **how: object) -> Tensor:
            return run(rows, self.to_halves(w) if isinstance(w, Tensor) else w, sizes, **how)

        return cast(GemmFunction, composed)

    def writing(self, run: GemmFunction) -> GemmFunction:
        """`run`, wgrad; with `out`, the sum of an accumulating one too, the bits are those of the halves'."""

        @wraps(run)
        def composed(
            x: Operand, dy: Operand, sizes: Sizes, /, *, out: Tensor | None = None, accumulate: bool = False
        ) -> Tensor:
            if out is None:
                return from_halves(run(x, dy, sizes), self.block, self.exchange)
            halves = self.to_halves(out) if accumulate else torch.empty(out.shape, dtype=out.dtype, device=out.device)
            run(x, dy, sizes, out=halves, accumulate=accumulate)
            return from_halves(halves, self.block, self.exchange, out)

        return cast(GemmFunction, composed)

    def quantizing(self, run: QuantizerFunction) -> QuantizerFunction:
        """`run`, a quantizer in any of its forms."""

        @wraps(run)
        def composed(w: Tensor, sizes: None = None, /, **how: object) -> object:
            return run(self.to_halves(w), sizes, **how)

        return cast(QuantizerFunction, composed)

"""Gate and up projections that take turns in blocks of rows, brought to two halves and back.

Interleaved in blocks of b: b rows of the gate, b of the up projection, and so on; b = F is the gate half first.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from octavo_registry.contract.cards import GATED, Activation
from octavo_torch.arrays.checks import told


def check_interleave(interleave: Any, activation: Activation, weight: Tensor) -> int:
    """The rows of a block, 0 where the gate half comes first; ValueError for blocks that do not divide the halves.

    weight   [G, 2 F, K], or one group's
    """
    if interleave is None:
        return 0
    if isinstance(interleave, bool) or not isinstance(interleave, int) or interleave < 1:
        raise ValueError(f"interleave is {told(interleave)}; give the rows of a block of the gate, 1 or more, or None")
    if activation not in GATED:
        raise ValueError(f"interleave is {interleave} and {activation} has no gate; leave it out")
    half = weight.shape[-2] // 2
    if half % interleave:
        raise ValueError(
            f"interleave is {interleave} and the weight has {half} rows of the gate; give a divisor of {half}"
        )
    return 0 if interleave == half else interleave


def to_halves(value: Tensor, block: int) -> Tensor:
    """[G, 2 F, ...] interleaved in blocks as a new tensor with the gate half first."""
    groups, rows, *rest = value.shape
    return value.reshape(groups, -1, 2, block, *rest).transpose(1, 2).reshape(groups, rows, *rest)


def from_halves(value: Tensor, block: int) -> Tensor:
    """The other way round."""
    groups, rows, *rest = value.shape
    return value.reshape(groups, 2, -1, block, *rest).transpose(1, 2).reshape(groups, rows, *rest)


def interleaved_wgrad(wgrad: Callable[..., Any], block: int) -> Callable[..., Any]:
    """`wgrad` of the two halves as that of the interleaved weight; into `out` with the bits it would have in place."""

    def run(x: Any, dy: Any, sizes: Any, *, out: Tensor | None = None, accumulate: bool = False) -> Tensor:
        if out is None:
            return from_halves(wgrad(x, dy, sizes), block)
        beside = to_halves(out, block) if accumulate else torch.empty(out.shape, dtype=out.dtype, device=out.device)
        wgrad(x, dy, sizes, out=beside, accumulate=accumulate)
        return out.copy_(from_halves(beside, block))

    return run

"""Gated weights whose gate and up rows alternate in blocks, converted to two halves and back.

Interleaved in blocks of b: b rows of the gate, b rows of the up projection, and so on; b = F is the plain order, with
the gate half first.
"""

from __future__ import annotations

from torch import Tensor

from octavo_registry.contract.cards import GATED, Activation
from octavo_torch.arrays.checks import brief
from octavo_torch.arrays.weight_order import order_of


def check_interleave(interleave: int | None, activation: Activation, weight: Tensor) -> int:
    """The rows of a block, 0 where the gate half comes first; raises ValueError where blocks do not divide the halves.

    weight   [G, 2 F, K], or one group's
    """
    if interleave is None:
        return 0
    if isinstance(interleave, bool) or not isinstance(interleave, int) or interleave < 1:
        raise ValueError(f"interleave is {brief(interleave)}; give the gate rows per block, at least 1, or None")
    if activation not in GATED:
        raise ValueError(f"interleave is {interleave} and {activation} has no gate; leave it out")
    half = weight.shape[-2] // 2
    if half % interleave:
        raise ValueError(f"interleave is {interleave} and the weight has {half} gate rows; give a divisor of {half}")
    return 0 if interleave == half else interleave


def to_halves(value: Tensor, block: int) -> Tensor:
    """`value` [G, 2 F, ...], interleaved in blocks, as a new tensor with the gate half first.

    It lies in memory as `value` does: as [G, K, 2 F] where that is a view of such matrices, which nothing transposes.
    """
    return _exchanged(value, (-1, 2, block))


def from_halves(value: Tensor, block: int) -> Tensor:
    """`value` [G, 2 F, ...], the gate half first, as a new tensor interleaved in blocks; in memory likewise."""
    return _exchanged(value, (2, -1, block))


def _exchanged(value: Tensor, parts: tuple[int, int, int]) -> Tensor:
    """`value` [G, 2 F, ...] as a new tensor, whose rows are cut into `parts`, of which the first two are exchanged."""
    if value.dim() == 3 and order_of(value) == "kn":
        groups, columns, rows = value.mT.shape
        return value.mT.reshape(groups, columns, *parts).transpose(2, 3).reshape(groups, columns, rows).mT
    groups, rows, *rest = value.shape
    return value.reshape(groups, *parts, *rest).transpose(1, 2).reshape(groups, rows, *rest)

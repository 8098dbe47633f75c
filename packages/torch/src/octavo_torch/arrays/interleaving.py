"""Gated weights whose gate and up rows alternate in blocks, converted to two halves and back.

Interleaved in blocks of b: b rows of the gate, b rows of the up projection, and so on; b = F is the plain order, with
the gate half first.
"""

from __future__ import annotations

from math import prod

from torch import Tensor

from octavo_registry.contract.cards import GATED, Activation
from octavo_registry.contract.gemm import InterleaveHalves
from octavo_torch.arrays.checks import brief
from octavo_torch.arrays.weight_order import order_of

Interleave = InterleaveHalves[Tensor]


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
    return without_whole_halves(interleave, weight)


def check_stored_interleave(interleave: object, weight: Tensor) -> int:
    """The rows of a block in a weight [G, 2 F, K] of codes, 0 where the gate half comes first, or ValueError."""
    if isinstance(interleave, bool) or not isinstance(interleave, int) or interleave < 0:
        raise ValueError(f"interleave is {brief(interleave)}; give the gate rows per block, or 0")
    if interleave and weight.shape[-2] % (2 * interleave):
        raise ValueError(
            f"interleave is {interleave} and the weight has {weight.shape[-2]} rows; give a divisor of half, or 0"
        )
    return without_whole_halves(interleave, weight)


def without_whole_halves(interleave: int, weight: Tensor) -> int:
    """The rows of a block that fits; 0 if it is half of the weight [G, 2 F, K], in which nothing alternates then."""
    return 0 if 2 * interleave == weight.shape[-2] else interleave


def to_halves(value: Tensor, block: int, run: Interleave | None = None) -> Tensor:
    """`value` [G, 2 F, ...], interleaved in blocks, as a new tensor with the gate half first.

    It lies in memory as `value` does: as [G, K, 2 F] if that is a view of such matrices.

    run   the backend's function, if it has one: it gives the same bits in less time than torch's strided copies
    """
    return _exchanged(value, block, False, run, None)


def from_halves(value: Tensor, block: int, run: Interleave | None = None, out: Tensor | None = None) -> Tensor:
    """`value` [G, 2 F, ...], which has the gate half first, interleaved in blocks: in `out`, or as a new tensor.

    A new tensor lies in memory as `value` does.
    """
    made = _exchanged(value, block, True, run, out)
    return made if out is None else out


def _exchanged(value: Tensor, block: int, interleave: bool, run: Interleave | None, out: Tensor | None) -> Tensor:
    if value.dim() == 3 and order_of(value) == "kn":
        groups, columns, rows = value.mT.shape
        into = None if out is None else out.mT
        return _by_rows(value.mT, (groups * columns, rows, 1), block, interleave, run, into).mT
    groups, rows, *rest = value.shape
    return _by_rows(value, (groups, rows, prod(rest)), block, interleave, run, out)


def _by_rows(
    value: Tensor,
    shape: tuple[int, int, int],
    block: int,
    interleave: bool,
    run: Interleave | None,
    out: Tensor | None,
) -> Tensor:
    """`value`, whose rows are the second axis of `shape`, with these in the other order."""
    dense = out is None or out.is_contiguous()
    into = None if out is None or not dense else out.view(shape)
    if run is not None and value.is_contiguous():
        made = run(value.view(shape), block, interleave, into)
    else:
        count, rows, columns = shape
        blocks = rows // (2 * block)
        parts = (2, blocks) if interleave else (blocks, 2)
        turned = value.reshape(count, *parts, block, columns).transpose(1, 2)
        made = turned.reshape(shape) if into is None else into.view(turned.shape).copy_(turned)
    if out is not None and not dense:
        out.copy_(made.view(value.shape))
    return made.view(value.shape)

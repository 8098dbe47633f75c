"""The operands of a grouped GEMM: what follows from their specs, and rows that are gathered from tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from octavo import GroupedTensorSpec
from octavo.quantizer import Direction
from octavo_native.layouts import LAYOUTS_OF_DIRECTION
from octavo_registry.contract import TokenRows
from octavo_torch.plugin_api import GroupedTensor, quantizer_text
from octavo_torch_native.arrays.group_index import GroupIndex
from octavo_torch_native.gemm.spec import Tokens
from octavo_torch_native.quantizers import operators
from octavo_torch_native.quantizers.planes import PlaneSizes

Planes = tuple[Tensor, Tensor | None, Tensor | None]
"""Codes, scales and NVFP4's second level of an operand; or values, and that level; or what is not quantized, alone."""


class Gathered(NamedTuple):
    """Which operand's rows are gathered from tokens.

    order   the choice of each row; None: no rows are gathered
    each    the number of choices per token
    """

    side: Tokens = "none"
    order: Tensor | None = None
    each: int = 1


NOT_GATHERED = Gathered()


def plane_of(q: GroupedTensor, direction: Direction) -> Planes:
    """A plane of `q`: codes and their scales, or values; ValueError where it is absent."""
    codes: Tensor | None = getattr(q, direction)
    if codes is None:
        return q.plane(direction)
    return codes, getattr(q, f"{direction}_scale"), getattr(q, f"{direction}_global")


def gathered(side: Tokens, rows: TokenRows[Tensor]) -> Gathered:
    """The gathered `rows` on this side."""
    return Gathered(side, rows.order, rows.position.shape[1])


@dataclass(frozen=True, slots=True, eq=False)
class OperandPair:
    """What follows from the specs of a GEMM's two operands, computed once.

    specs           kept alive: a pair is found by their identity, because comparing or hashing one costs more than a
                    launch
    text            the GemmSpec, as the operators take it
    rows, n, k, groups   the kernel's sides; of left's codes of tokens, whose rows are gathered, `rows` are the tokens
    left_sizes, right_sizes   those that the operands' planes have to have
    convert_left, convert_right   whether an operand is plain, and is converted to the native layout in each call
    """

    specs: tuple[GroupedTensorSpec, GroupedTensorSpec]
    text: str
    rows: int
    n: int
    k: int
    groups: int
    left_sizes: PlaneSizes
    right_sizes: PlaneSizes
    convert_left: bool
    convert_right: bool


def native_planes(spec: GroupedTensorSpec, planes: Planes, index: GroupIndex, direction: Direction) -> Planes:
    """Plain planes in the native layout. Stacked matrices have no sizes, and no plan."""
    codes, scale, factor = planes
    words = index.words if spec.ragged_axis == 0 else None
    _, native_layout = LAYOUTS_OF_DIRECTION[direction]
    text = quantizer_text(spec.quantizer)
    assert scale is not None  # codes in a plain layout always have scales
    codes, scale = operators.convert(codes, scale, words, text, list(spec.shape), spec.groups, direction, native_layout)
    return codes, scale, factor

"""RowPlan: where the groups of one operand's rows begin, worked out once and used by many calls."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from octavo_torch_native.quantizers import operators


@dataclass(eq=False)
class RowPlan:
    """Group sizes as kernels read them; takes the place of `group_sizes` in this package's functions.

    words         int64 [octavo_native.plan_words(rows, G)]: the plan, on the device of the rows
    group_sizes   int64 [G], none negative, summing to at most `rows`
    rows          M
    """

    words: Tensor
    group_sizes: Tensor
    rows: int

    @property
    def groups(self) -> int:
        """G."""
        return self.group_sizes.shape[0]

    def check(self, rows: int, device: torch.device) -> None:
        """ValueError unless it was made for this many rows on this device."""
        if self.rows != rows or self.words.device != device:
            raise ValueError(
                f"group_sizes is a plan for {self.rows} rows on {self.words.device} and the operand has {rows} rows on "
                f"{device}; make one for them"
            )


def plan_rows(group_sizes: Tensor, rows: int, like: Tensor) -> RowPlan:
    """The plan of `group_sizes` [G] for `rows` rows on `like`'s device.

    Sizes in host memory are checked and raise ValueError; others are cut to bounds and set the device's status word.
    """
    words, bounded = operators.plan(group_sizes, rows, like)
    return RowPlan(words, bounded, rows)


def plan_of(shape: Sequence[int], group_sizes: Tensor | RowPlan | None, like: Tensor) -> RowPlan | None:
    """The plan of an operand of this shape, beside `like`; None for matrices [G, N, K], which need none.

    group_sizes   of [M, K]; None: all rows are one group
    """
    if len(shape) == 3:
        return None
    rows, device = shape[0], like.device
    if type(group_sizes) is RowPlan:
        group_sizes.check(rows, device)
        return group_sizes
    if group_sizes is None:
        group_sizes = torch.full((1,), rows, dtype=torch.int64, device=device)
    assert isinstance(group_sizes, Tensor)
    return plan_rows(group_sizes, rows, like)


def _flatten(plan: RowPlan) -> tuple[list[Any], int]:
    return [plan.words, plan.group_sizes], plan.rows


def _unflatten(tensors: Iterable[Any], rows: int) -> RowPlan:
    words, group_sizes = tensors
    return RowPlan(words, group_sizes, rows)


pytree.register_pytree_node(RowPlan, _flatten, _unflatten, serialized_type_name="octavo_torch_native.RowPlan")

"""GroupIndex: where the groups of one operand's rows begin, computed once and read by many calls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from octavo_torch_native.quantizers import operators


@dataclass(eq=False, slots=True)
class GroupIndex:
    """Group sizes as kernels read them; bound functions of this package take it in the place of `group_sizes`.

    words         int64 [octavo_native.plan_words(rows, G)], on the device of the rows
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
        """ValueError unless it was computed for this many rows on this device."""
        if self.rows != rows or self.words.device != device:
            raise ValueError(
                f"group_sizes is a GroupIndex of {self.rows} rows on {self.words.device} and the operand has {rows} "
                f"rows on {device}; compute one for them with octavo_torch_native.index_groups"
            )


def index_groups(group_sizes: Tensor, rows: int, like: Tensor) -> GroupIndex:
    """The index of integer `group_sizes` [G] for `rows` rows on `like`'s device.

    Sizes in host memory are checked and raise ValueError; others are cut to bounds and set the device's status word,
    which `octavo_torch.check_errors` reads.
    """
    words, bounded = operators.plan(group_sizes, rows, like)
    return GroupIndex(words, bounded, rows)


def group_index_of(shape: Sequence[int], group_sizes: Tensor | GroupIndex | None, like: Tensor) -> GroupIndex | None:
    """The index of an operand of this shape, on `like`'s device; None for matrices [G, N, K], which need none.

    group_sizes   of [M, K]; None: all rows are one group
    """
    if len(shape) == 3:
        return None
    rows, device = shape[0], like.device
    if type(group_sizes) is GroupIndex:
        group_sizes.check(rows, device)
        return group_sizes
    if group_sizes is None:
        group_sizes = torch.full((1,), rows, dtype=torch.int64, device=device)
    assert isinstance(group_sizes, Tensor)
    return index_groups(group_sizes, rows, like)

"""Operands among a ctx's saved tensors, and memory that a backward frees as soon as it has read it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from octavo import GroupedTensorSpec
from octavo_torch.arrays.grouped_tensor import PLANES_OF, GroupedTensor, Matrix
from octavo_torch.arrays.sizes import Sizes, group_sizes_of
from octavo_torch.arrays.valueless import Valueless
from octavo_torch.compiler.tracing import is_plain


class Saved:
    """Where the tensors of one operand are in ctx.saved_tensors, and how the operand is rebuilt of them.

    own      whether the call has made the codes, so that it may free them
    planes   the planes that are kept of a quantized operand
    """

    def __init__(
        self,
        value: Matrix,
        tensors: list[Tensor | None],
        own: bool = False,
        planes: tuple[str, ...] = PLANES_OF["columnwise"],
    ) -> None:
        self.start, self.own, self.planes = len(tensors), own, planes
        self.spec: GroupedTensorSpec | None = None
        if isinstance(value, GroupedTensor):
            self.spec = value.spec
            tensors.append(value.group_sizes)
            tensors.extend(getattr(value, name) for name in planes)
        else:
            tensors.append(value)

    def load(self, tensors: Sequence[Tensor]) -> Matrix:
        """The operand, rebuilt: as values, or with the planes that were kept. ValueError for codes alone as values."""
        if self.spec is None:
            value = tensors[self.start]
            if isinstance(value, Valueless):
                raise ValueError(
                    "backward reads values of the weight, because its recipe has dgrad='high_precision', and the "
                    "weight is codes alone; load it as values, or into a layer whose recipe quantizes dgrad"
                )
            return value
        sizes, *planes = tensors[self.start : self.start + 1 + len(self.planes)]
        return GroupedTensor(self.spec, sizes, **dict(zip(self.planes, planes, strict=True)))

    def free(self, tensors: Sequence[Tensor]) -> None:
        """Frees the memory of the codes if the call has made them: see `free_saved`."""
        if self.own and self.spec is not None:
            free_saved(tensors[self.start + 1])


SavedByName = dict[str, Saved]
"""Where the operands that a backward reads are in ctx.saved_tensors, by name."""


def without_sizes(value: Matrix) -> Matrix:
    """The operand, to be saved without sizes: they are the call's, and are saved once or made again."""
    return replace(value, group_sizes=None) if isinstance(value, GroupedTensor) else value


def with_sizes(rows: Matrix, sizes: Sizes) -> Matrix:
    """Rows that were saved without sizes, and have these now."""
    return replace(rows, group_sizes=group_sizes_of(sizes)) if isinstance(rows, GroupedTensor) else rows


def may_free(dy: Tensor) -> bool:
    """Whether the running backward may free what it has read: it was not asked to retain the graph for a later one."""
    return is_plain(dy) and not torch._C._autograd._get_current_graph_task_keep_graph()


def free_saved(tensor: Tensor) -> None:
    """Frees a saved tensor's memory at once. Autograd would keep it until the node ends."""
    tensor.data = tensor.new_empty(0)


def caller_sizes(sizes: Sizes) -> Tensor | None:
    """The sizes that autograd saves, so that it detects if the caller changes them in place before the backward.

    None if the sizes are prepared: those are the call's own, and nobody changes them.
    """
    return sizes if isinstance(sizes, Tensor) else None

"""Rows with any leading axes: x [..., K] is M rows of K, in order, and what belongs to rows has x's leading axes."""

from __future__ import annotations

from math import prod
from typing import TypeGuard

import torch
from torch import Tensor

from octavo_torch.arrays.operands import check_not_nested


def has_other_rank(x: object) -> TypeGuard[Tensor]:
    """True for a tensor of one axis, or of more than two."""
    return isinstance(x, Tensor) and x.dim() not in (0, 2) and x.layout is torch.strided


class LeadingAxes:
    """The leading axes of an x [..., K]: flattened to rows [M, K] for a call, and restored in its result."""

    def __init__(self, x: Tensor) -> None:
        check_not_nested("x", x)
        self.shape = tuple(x.shape[:-1])
        self.rows = prod(self.shape)

    def flat(self, x: Tensor) -> Tensor:
        """x as [M, K], differentiable; a view where its strides allow one."""
        return x.reshape(self.rows, x.shape[-1])

    def of_rows(self, name: str, value: Tensor | None) -> Tensor | None:
        """One number per row as [M], differentiable. ValueError unless it has just x's leading axes."""
        if value is None:
            return None
        if not isinstance(value, Tensor) or tuple(value.shape) != self.shape:
            given = list(value.shape) if isinstance(value, Tensor) else f"a {type(value).__name__}"
            raise ValueError(f"{name} is {given}; give x's leading axes, {list(self.shape)}")
        return value.reshape(self.rows)

    def buffer(self, name: str, value: Tensor | None) -> Tensor | None:
        """A buffer of the caller's as [M, n], in the same memory.

        ValueError unless it has x's leading axes and one more, and strides that allow such a view.
        """
        if value is None:
            return None
        if not isinstance(value, Tensor) or tuple(value.shape[:-1]) != self.shape or not value.dim():
            given = list(value.shape) if isinstance(value, Tensor) else f"a {type(value).__name__}"
            raise ValueError(f"{name} is {given}; give x's leading axes {list(self.shape)} and its columns")
        try:
            return value.view(self.rows, value.shape[-1])
        except RuntimeError as error:
            raise ValueError(
                f"{name} has shape {list(value.shape)} and strides {list(value.stride())}, of which there is no view "
                f"{[self.rows, value.shape[-1]]}; give a buffer whose leading axes are evenly spaced"
            ) from error

    def restored(self, y: Tensor) -> Tensor:
        """A result [M, n] as [..., n]."""
        return y.reshape(*self.shape, y.shape[-1])

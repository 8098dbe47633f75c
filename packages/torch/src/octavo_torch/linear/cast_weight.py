"""CastWeight: a weight that a call inside of torch.autocast reads in autocast's dtype."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from octavo_torch.arrays.dtypes import DTYPE_NAMES
from octavo_torch.arrays.per_group import Weights
from octavo_torch.arrays.zero_gradient import cast_gradient
from octavo_torch.compiler.autograd_context import AutogradContext
from octavo_torch.compiler.second_derivative import FirstOrderFunction
from octavo_torch.linear.coded_weight import CodedWeight
from octavo_torch.linear.weights import QuantizedWeight


@dataclass(frozen=True, slots=True, eq=False)
class CastWeight:
    """A layer's weight, and the dtype in which a call reads its values.

    Autograd casts the gradient back; with `main_grad`, or where it is postponed, it goes to the weight itself.
    """

    weight: Weights | QuantizedWeight
    dtype: torch.dtype


class _Context(AutogradContext, Protocol):
    dtype: torch.dtype


class _Cast(FirstOrderFunction):
    """A weight in another dtype; its gradient in the weight's, for which zeros may stand."""

    @staticmethod
    def forward(ctx: _Context, weight: Tensor, dtype: torch.dtype) -> Tensor:
        """The values, cast; of a CodedWeight another one of the same codes, no plane of which is copied."""
        ctx.dtype = weight.dtype
        if isinstance(weight, CodedWeight):
            return CodedWeight(weight.codes, weight.recipe, dtype, weight.interleave)
        return weight.to(dtype)

    @staticmethod
    def backward(ctx: _Context, grad: Tensor) -> tuple[Tensor, None]:
        """The gradient, cast back."""
        return cast_gradient(grad, ctx.dtype), None


_cast: Callable[[Tensor, torch.dtype], Tensor] = _Cast.apply


def cast_values(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """`weight` in `dtype`, differentiably; itself where it has that dtype, or one that no layer takes."""
    castable = isinstance(weight, Tensor) and weight.dtype in DTYPE_NAMES and weight.dtype is not dtype
    return _cast(weight, dtype) if castable else weight

"""What linear layers and MLPs do with a weight and a bias before they run: dtype, codes, the gradient's target."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from octavo_torch.arrays.dtypes import DTYPE_NAMES
from octavo_torch.arrays.per_group import Weights, as_one
from octavo_torch.arrays.zero_gradient import cast_gradient
from octavo_torch.compiler.autograd_context import AutogradContext
from octavo_torch.compiler.second_derivative import FirstOrderFunction
from octavo_torch.compiler.tracing import is_plain
from octavo_torch.linear.call import Call
from octavo_torch.linear.coded_weight import CodedWeight, operands_of
from octavo_torch.linear.weights import QuantizedWeight
from octavo_torch.wgrad.target import target_for


@dataclass(frozen=True, slots=True, eq=False)
class CastWeight:
    """A layer's weight, and the dtype in which a call reads its values.

    Autograd casts the gradient back; with `main_grad`, or where it is postponed, it goes to the weight itself.
    """

    weight: Weights | QuantizedWeight
    dtype: torch.dtype


class _CastContext(AutogradContext, Protocol):
    dtype: torch.dtype


class _Cast(FirstOrderFunction):
    """A weight in another dtype; its gradient in the weight's, for which zeros may stand."""

    @staticmethod
    def forward(ctx: _CastContext, weight: Tensor, dtype: torch.dtype) -> Tensor:
        """The values, cast; of a CodedWeight another one of the same codes, no plane of which is copied."""
        ctx.dtype = weight.dtype
        if isinstance(weight, CodedWeight):
            return CodedWeight(weight.codes, weight.recipe, dtype, weight.interleave)
        return weight.to(dtype)

    @staticmethod
    def backward(ctx: _CastContext, grad: Tensor) -> tuple[Tensor, None]:
        """The gradient, cast back."""
        return cast_gradient(grad, ctx.dtype), None


_cast: Callable[[Tensor, torch.dtype], Tensor] = _Cast.apply


def cast_values(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """`weight` in `dtype`, differentiably; itself where it has that dtype, or one that no layer takes."""
    castable = isinstance(weight, Tensor) and weight.dtype in DTYPE_NAMES and weight.dtype is not dtype
    return _cast(weight, dtype) if castable else weight


GivenWeight = Weights | QuantizedWeight | CastWeight
"""A layer's weight: as the caller gave it, or in autocast."""


class Parameters(NamedTuple):
    """One layer's weight and bias as a call takes them.

    source   the weight of this rank, quantized or not
    leaves   the high-precision weight, which receives the gradient: one tensor, or one per group
    weight   [G, N, K]: those leaves as one tensor, in the dtype in which the call reads them
    bias     [G, N], or None
    """

    source: Weights | QuantizedWeight
    leaves: Weights
    weight: Tensor
    bias: Tensor | None


def parameters_of(weight: GivenWeight, bias: Weights | None, names: tuple[str, str] = ("weight", "bias")) -> Parameters:
    """Local shards of DTensors, and one tensor per parameter.

    Raises ValueError, naming the argument, for unequal parts, and for codes of values in another dtype.
    """
    dtype = None
    if isinstance(weight, CastWeight):
        dtype = weight.dtype
        weight = weight.weight
    source, bias = operands_of(weight, bias)
    leaves = source.weight if isinstance(source, QuantizedWeight) else source
    whole = as_one(names[0], leaves)
    if dtype is not None:
        whole = cast_values(whole, dtype)
    if isinstance(source, QuantizedWeight):
        source.check_values(names[0], whole.dtype)
    return Parameters(source, leaves, whole, None if bias is None else as_one(names[1], bias))


def resolve_weight(call: Call, parameters: Parameters, need_dw: bool, name: str = "weight") -> Tensor:
    """Sets the call's weight codes and its target. Returns the weight as autograd is given it.

    name   of the weight in messages

    Raises ValueError for codes that do not fit the layer, and for a target that does not fit the weight.
    """
    source, leaves, weight, _ = parameters
    if isinstance(source, QuantizedWeight):
        source.check(call.recipe, call.layer.w_layouts, call.layer.w_order)
        if source.interleave != call.interleave:
            raise ValueError(
                f"{name} was quantized for interleave={source.interleave or None} and the call takes it with "
                f"{call.interleave or None}; quantize it for this one"
            )
        call.w_codes = source.codes
    if call.main_grad is None and call.delayed_wgrad is None:
        return weight
    call.target = target_for(leaves, need_dw, call.main_grad, call.delayed_wgrad)
    # without any gradient autograd would still run the weight's hooks: a DelayedWgrad's anchor takes its place
    return weight if anchor_of(call) is None else weight.detach()


def anchor_of(call: Call) -> Tensor | None:
    """The tensor that takes the place of a weight whose gradient is postponed."""
    target = call.target
    return None if target is None or target.store is None else target.store.anchor


def mark_written(buffer: Tensor | None) -> None:
    """Bumps the version of a caller's buffer, so that references saved by autograd are detected."""
    if buffer is not None and is_plain(buffer):
        torch.autograd.graph.increment_version(buffer)

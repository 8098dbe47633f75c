"""What a call does with a weight and a bias before it runs: local shards, dtype, codes, the gradient's target."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial

from octavo_torch.arrays.dtypes import DTYPE_NAMES
from octavo_torch.arrays.per_group import Weights, as_one
from octavo_torch.arrays.zero_gradient import cast_gradient
from octavo_torch.compiler.autograd_context import AutogradContext
from octavo_torch.compiler.refused_derivatives import FirstOrderFunction
from octavo_torch.compiler.tracing import is_plain
from octavo_torch.linear.call import Call
from octavo_torch.linear.coded_weight import CodedWeight
from octavo_torch.linear.weights import QuantizedWeight
from octavo_torch.wgrad.target import target_for

_IN_FEATURES = 2
"""Their axis in a weight [G, N, K]."""


@dataclass(frozen=True, slots=True, eq=False)
class CastWeight:
    """A layer's weight, and the dtype in which a call inside of autocast reads its values.

    Autograd casts the gradient back. A gradient for `main_grad`, or a postponed one, is of the weight itself.
    """

    weight: Weights | QuantizedWeight
    dtype: torch.dtype


class _CastContext(AutogradContext, Protocol):
    dtype: torch.dtype


class _Cast(FirstOrderFunction):
    """A weight in another dtype. Its gradient is cast back to the weight's dtype; a ZeroGradient remains one."""

    @staticmethod
    def forward(ctx: _CastContext, weight: Tensor, dtype: torch.dtype) -> Tensor:
        """The values, cast. A CodedWeight becomes one that has the same codes, without a copy, and this dtype."""
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
    """`weight` in `dtype`, differentiably. Returns `weight` itself if it has that dtype, or one that no layer takes."""
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
    uncast   of a weight that was cast, the tensor [G, N, K] before that; else None
    """

    source: Weights | QuantizedWeight
    leaves: Weights
    weight: Tensor
    bias: Tensor | None
    uncast: Tensor | None = None


def local_parameters(
    weight: Weights | QuantizedWeight, bias: Weights | None
) -> tuple[Weights | QuantizedWeight, Weights | None]:
    """A weight and a bias of this rank: the local shards of DTensors. A CodedWeight becomes a QuantizedWeight."""
    if isinstance(bias, DTensor):
        bias = _local_bias(bias, weight)
    if isinstance(weight, DTensor):
        weight = weight.to_local()
    return weight.quantized() if isinstance(weight, CodedWeight) else weight, bias


def _local_bias(bias: DTensor, weight: object) -> Tensor:
    """The local shard of a bias.

    Where in-features are sharded, the ranks' results are summed: there the bias is zero on all ranks but the first.
    """
    shards = weight.placements if isinstance(weight, DTensor) and weight.device_mesh == bias.device_mesh else ()
    summed = [axis for axis, placement in enumerate(shards) if placement.is_shard(_IN_FEATURES)]
    grads = [Partial() if axis in summed else placement for axis, placement in enumerate(bias.placements)]
    local = bias.to_local(grad_placements=grads)
    if any(bias.device_mesh.get_local_rank(axis) for axis in summed):
        return local.masked_fill(torch.ones((), dtype=torch.bool, device=local.device), 0)
    return local


def parameters_of(weight: GivenWeight, bias: Weights | None, names: tuple[str, str] = ("weight", "bias")) -> Parameters:
    """The Parameters of this rank. Tensors per group are joined, and a CastWeight is cast.

    names   of the two arguments in messages

    Raises ValueError for tensors per group that are not alike, and for codes of values in another dtype.
    """
    dtype = None
    if isinstance(weight, CastWeight):
        dtype = weight.dtype
        weight = weight.weight
    source, bias = local_parameters(weight, bias)
    leaves = source.weight if isinstance(source, QuantizedWeight) else source
    whole = given = as_one(names[0], leaves)
    if dtype is not None:
        whole = cast_values(given, dtype)
    if isinstance(source, QuantizedWeight):
        source.check_values(names[0], whole.dtype)
    uncast = None if whole is given else given
    return Parameters(source, leaves, whole, None if bias is None else as_one(names[1], bias), uncast)


def resolve_weight(call: Call, parameters: Parameters, need_dw: bool, name: str = "weight") -> Tensor:
    """Sets the call's `w_codes`, `w_values` and `target`. Returns the tensor that autograd has to see as the weight.

    That is the tensor before autocast's cast, whose own backward would get no gradient in fp32, but a rounded one.

    need_dw   whether the weight's gradient is needed
    name      of the weight in messages

    Raises ValueError for codes that do not fit the layer, and for a target that does not fit the weight.
    """
    source, leaves, weight, _, uncast = parameters
    if isinstance(source, QuantizedWeight):
        source.check(call.recipe, call.layer.w_layouts, call.layer.w_order)
        if source.interleave != call.interleave:
            raise ValueError(
                f"{name} was quantized for interleave={source.interleave or None} and the call takes it with "
                f"{call.interleave or None}; quantize it for this one"
            )
        call.w_codes = source.codes
    if call.main_grad is None and call.delayed_wgrad is None:
        if uncast is None:
            return weight
        call.w_values = weight.detach()
        return uncast
    call.target = target_for(leaves, need_dw, call.main_grad, call.delayed_wgrad)
    # autograd runs a weight's hooks even without a gradient for it, so a postponed one is detached: see anchor_of
    return weight if anchor_of(call) is None else weight.detach()


def anchor_of(call: Call) -> Tensor | None:
    """The tensor that requires a gradient in place of a weight whose own is postponed; None if it is not postponed."""
    target = call.target
    return None if target is None or target.store is None else target.store.anchor


def mark_written(buffer: Tensor | None) -> None:
    """Bumps the version of a caller's buffer, so that references saved by autograd are detected."""
    if buffer is not None and is_plain(buffer):
        torch.autograd.graph.increment_version(buffer)

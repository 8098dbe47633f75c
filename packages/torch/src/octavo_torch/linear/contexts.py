"""Calls inside torch.autocast and torch.func's transforms, which the autograd functions of layers do not see."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar, cast

import torch
from torch import Tensor

from octavo_torch.arrays.dtypes import DTYPE_NAMES, name_of
from octavo_torch.arrays.grouped_tensor import GroupedTensor
from octavo_torch.arrays.per_group import Weights
from octavo_torch.autograd.transformed import transformed
from octavo_torch.compiler.autocast import autocast_anywhere, autocast_on
from octavo_torch.compiler.recorders import check_not_recorded, dispatch_modes, is_jit_tracing
from octavo_torch.compiler.transforms import Subject, is_batched, no_transform, transforms_active, unwrapped
from octavo_torch.linear.parameters import CastWeight
from octavo_torch.linear.quantized_input import QuantizedInput
from octavo_torch.linear.weights import QuantizedWeight
from octavo_torch.scaling.delayed_state import DelayedState

_WEIGHTS = frozenset({"weight", "w1", "w2"})

C = TypeVar("C")
S = TypeVar("S", DelayedState, DelayedState | None)

LAYER = Subject(
    "a grouped layer",
    "groups are the layer's own batch: give all rows in one call, a group of group_sizes for each",
)


def any_active() -> bool:
    """Whether the call is inside of any context, so that `concerns` has to be asked.

    `linear.grouped.apply` has this condition inline, because it runs in every call.
    """
    return autocast_anywhere() or transforms_active() or is_jit_tracing() or dispatch_modes() > 0


def concerns(x: object) -> bool:
    """Whether a call with the rows `x` has to go through `run`: inside a transform, or with autocast on for x's device.

    Raises NotImplementedError inside a recorder, which would record the call without what its kernels do.
    """
    check_not_recorded(x)
    if transforms_active():
        return True
    return autocast_on(_device_of(x))


def run(function: Callable[..., Tensor], operands: Mapping[str, object]) -> Tensor:
    """`function(**operands)` as the active context needs it: by `transformed` inside a transform, and otherwise with x
    and the weights in autocast's dtype, and with autocast off inside of the call.

    operands   of the call, by name; in autocast x is cast, and a weight becomes a CastWeight
    """
    if transforms_active():
        return transformed(function, operands, LAYER)
    device = _device_of(operands["x"])
    dtype = torch.get_autocast_dtype(device)
    with torch.autocast(device, enabled=False):
        return function(**{name: _cast(name, value, dtype) for name, value in operands.items()})


def run_backward(backward: Callable[[C, Tensor], list[Tensor | None]], ctx: C, dy: Tensor) -> list[Tensor | None]:
    """`backward(ctx, dy)` with autocast off, because the forward has chosen the dtypes already.

    Raises NotImplementedError for a batch of gradients (`is_grads_batched` of torch.autograd.grad): no kernel takes it.
    """
    try:
        if not autocast_anywhere():
            return backward(ctx, dy)
        with torch.autocast(dy.device.type, enabled=False):
            return backward(ctx, dy)
    except RuntimeError as error:  # only now, because is_batched costs as much as a launch's arguments
        if is_batched(dy):
            raise no_transform("vmap", LAYER) from error
        raise


def unwrapped_state(state: S) -> S:
    """`state` with its own tensors in place of the wrappers that torch.func.grad puts around its function's arguments.

    The state has no derivative, and what a call records has to be written into its own memory.
    """
    if state is None or unwrapped(state.history) is state.history:
        return state
    return DelayedState(state.recipe, unwrapped(state.history), unwrapped(state.scale))


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """The dtype to which calls on this device cast x and weights; None outside of torch.autocast."""
    if not autocast_on(device.type):
        return None
    return torch.get_autocast_dtype(device.type)


def _cast(name: str, value: object, dtype: torch.dtype) -> object:
    if name in _WEIGHTS:
        return CastWeight(cast("Weights | QuantizedWeight", value), dtype)
    if name == "x" and isinstance(value, Tensor) and value.dtype in DTYPE_NAMES:
        return value.to(dtype)
    if isinstance(value, QuantizedInput) and value.x.dtype is not dtype:
        raise ValueError(
            f"x was quantized outside of torch.autocast, from rows in {name_of(value.x.dtype)}, and the call reads "
            f"them in {name_of(dtype)}, whose codes are others; quantize it inside of autocast, too"
        )
    return value


def _device_of(x: object) -> str:
    """The kind of device that a call's rows are on, codes or not."""
    if isinstance(x, QuantizedInput):
        x = x.x
    return x.device.type if isinstance(x, Tensor | GroupedTensor) else "cpu"

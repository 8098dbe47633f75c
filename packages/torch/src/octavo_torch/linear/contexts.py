"""Calls inside torch.autocast and torch.func's transforms, which the autograd functions of layers do not see."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NoReturn, Protocol, TypeVar, cast

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from octavo_torch.arrays.dtypes import DTYPE_NAMES, name_of
from octavo_torch.arrays.grouped_tensor import GroupedTensor
from octavo_torch.arrays.per_group import Weights
from octavo_torch.arrays.versioned import Versioned
from octavo_torch.compiler.autograd_context import AutogradContext
from octavo_torch.compiler.recorders import check_not_recorded, dispatch_modes, is_jit_tracing
from octavo_torch.compiler.refused_derivatives import no_second_derivative
from octavo_torch.compiler.transforms import (
    Subject,
    check_transform,
    is_batched,
    no_transform,
    transforms_active,
    unwrapped,
)
from octavo_torch.linear.prepare import CastWeight
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

autocast_anywhere: Callable[[], bool] = torch._C._is_any_autocast_enabled


def any_active() -> bool:
    """Whether the call is inside any context, so that `concerns` has to be asked. `linear.grouped.apply` has this
    condition inline, because it runs in every call."""
    return autocast_anywhere() or transforms_active() or is_jit_tracing() or dispatch_modes() > 0


def concerns(x: object) -> bool:
    """Whether a call with the rows `x` has to go through `run`: in a transform, and with autocast on for x's device.

    Raises NotImplementedError inside a recorder, which would record the call without what its kernels do.
    """
    check_not_recorded(x)
    if transforms_active():
        return True
    return autocast_on(_device_of(x))


def run(function: Callable[..., Tensor], operands: Mapping[str, object]) -> Tensor:
    """`function(**operands)` as the active context needs it: see `transformed`; or, with autocast on, with x and the
    weights in autocast's dtype, and with autocast off inside of the call.

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


def autocast_on(device: str) -> bool:
    """Whether calls on this kind of device are inside torch.autocast. "meta" has none, and torch raises if asked."""
    return autocast_anywhere() and torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)


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


class _RepeatableCall:
    """A call as a function of the tensors among its operands, however deep they are in tuples and codes."""

    def __init__(self, function: Callable[..., Tensor], operands: Mapping[str, object], subject: Subject) -> None:
        known = {
            name: value.without_version() if isinstance(value, Versioned) else value for name, value in operands.items()
        }
        leaves, self._spec = pytree.tree_flatten(known)
        self._places = [number for number, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        self.tensors: list[Tensor] = [leaves[number] for number in self._places]
        self._leaves = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self._function, self.subject = function, subject

    def __call__(self, *tensors: Tensor) -> Tensor:
        """The call's result, with these tensors."""
        leaves = [*self._leaves]
        for number, value in zip(self._places, tensors, strict=True):
            leaves[number] = value
        return self._function(**pytree.tree_unflatten(leaves, self._spec))


def transformed(function: Callable[..., Tensor], operands: Mapping[str, object], subject: Subject) -> Tensor:
    """`function(**operands)` inside torch.func.grad, where it sees ordinary tensors, and has one derivative.

    Raises NotImplementedError inside other transforms.
    """
    check_transform(subject)
    call = _RepeatableCall(function, operands, subject)
    return _transformed_call(call, *call.tensors)


class _CallContext(AutogradContext, Protocol):
    call: _RepeatableCall


class _Transformed(torch.autograd.Function):
    """A call inside torch.func.grad: forward sees ordinary tensors, and backward runs it again with autograd."""

    @staticmethod
    def forward(call: _RepeatableCall, *tensors: Tensor) -> Tensor:
        """The call's result."""
        return call(*tensors)

    @staticmethod
    def setup_context(ctx: _CallContext, inputs: tuple[_RepeatableCall, *tuple[Tensor, ...]], output: Tensor) -> None:
        """Keeps the call and its tensors."""
        ctx.call = inputs[0]
        ctx.save_for_backward(*inputs[1:])

    @staticmethod
    def backward(ctx: _CallContext, dy: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of the tensors."""
        needs = tuple(ctx.needs_input_grad[1:])
        grads = iter(_gradients(ctx.call, needs, dy, *ctx.saved_tensors))
        return (None, *(next(grads) if needed else None for needed in needs))

    @staticmethod
    def vmap(info: object, in_dims: object, call: _RepeatableCall, *_: object) -> NoReturn:
        """Raises NotImplementedError."""
        raise no_transform("vmap", call.subject)


class _Gradients(torch.autograd.Function):
    """The gradients of a call, which have no derivative."""

    @staticmethod
    def forward(call: _RepeatableCall, needs: tuple[bool, ...], dy: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        """One for each tensor that needs one."""
        with torch.enable_grad():
            leaves = [value.detach().requires_grad_(needed) for value, needed in zip(tensors, needs, strict=True)]
            inputs = [leaf for leaf, needed in zip(leaves, needs, strict=True) if needed]
            return torch.autograd.grad(call(*leaves), inputs, dy)

    @staticmethod
    def setup_context(*_: object) -> None:
        """Keeps nothing."""

    @staticmethod
    def backward(*_: object) -> NoReturn:
        """Raises NotImplementedError."""
        raise no_second_derivative()

    @staticmethod
    def vmap(info: object, in_dims: object, call: _RepeatableCall, *_: object) -> NoReturn:
        """Raises NotImplementedError."""
        raise no_transform("vmap", call.subject)


_transformed_call: Callable[..., Tensor] = _Transformed.apply
_gradients: Callable[..., tuple[Tensor, ...]] = _Gradients.apply

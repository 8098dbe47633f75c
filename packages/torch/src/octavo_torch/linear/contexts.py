"""Calls inside torch.autocast and torch.func's transforms, which a layer's own autograd knows nothing of."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NoReturn, Protocol, TypeVar

import torch
from torch import Tensor
from torch._C import _functorch

from octavo_torch.arrays.dtypes import DTYPE_NAMES
from octavo_torch.compiler.autograd_context import AutogradContext
from octavo_torch.compiler.second_derivative import refuse
from octavo_torch.linear.cast_weight import CastWeight
from octavo_torch.scaling.delayed_state import DelayedState

_WEIGHTS = frozenset({"weight", "w1", "w2"})

C = TypeVar("C")
S = TypeVar("S", DelayedState, DelayedState | None)

autocast_anywhere: Callable[[], bool] = torch._C._is_any_autocast_enabled
transforms_active: Callable[[], bool] = torch._C._are_functorch_transforms_active


def matters(x: object) -> bool:
    """True where a call with these rows goes through `run`: in a transform, or with autocast on for x's device."""
    if transforms_active():
        return True
    return isinstance(x, Tensor) and torch.is_autocast_enabled(x.device.type)


def run(function: Callable[..., Tensor], operands: Mapping[str, object]) -> Tensor:
    """`function(**operands)`: with x and weights in autocast's dtype and autocast off, or as transforms take it.

    operands   of the call, by name; x is cast, and a weight becomes a CastWeight
    """
    if transforms_active():
        return _transformed(function, operands)
    x = operands["x"]
    device = x.device.type if isinstance(x, Tensor) else "cpu"
    dtype = torch.get_autocast_dtype(device)
    with torch.autocast(device, enabled=False):
        return function(**{name: _cast(name, value, dtype) for name, value in operands.items()})


def run_backward(backward: Callable[[C, Tensor], list[Tensor | None]], ctx: C, dy: Tensor) -> list[Tensor | None]:
    """`backward(ctx, dy)` with autocast off: it has chosen its dtypes already.

    Raises NotImplementedError for many gradients at once (`is_grads_batched` of torch.autograd.grad), as no kernel
    takes them.
    """
    try:
        if not autocast_anywhere():
            return backward(ctx, dy)
        with torch.autocast(dy.device.type, enabled=False):
            return backward(ctx, dy)
    except RuntimeError as error:  # asked here, not before: to ask costs as much as a launch's arguments
        if _functorch.is_legacy_batchedtensor(dy) or _functorch.is_batchedtensor(dy):
            raise NotImplementedError(_no_transform("vmap")) from error
        raise


def in_place(state: S) -> S:
    """`state` on the tensors that torch.func.grad has wrapped, as it does with every argument of its function.

    The state takes no part in the derivative: it is read, and changed in place, in its own memory.
    """
    if state is None or not transforms_active():
        return state
    return DelayedState(state.recipe, _unwrapped(state.history), _unwrapped(state.scale))


def _unwrapped(value: Tensor) -> Tensor:
    while _functorch.is_gradtrackingtensor(value):
        value = _functorch.get_unwrapped(value)
    return value


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """The dtype to which calls on this device cast x and weights; None outside of torch.autocast."""
    if not autocast_anywhere() or not torch.is_autocast_enabled(device.type):
        return None
    return torch.get_autocast_dtype(device.type)


def _cast(name: str, value: Any, dtype: torch.dtype) -> object:
    if name in _WEIGHTS:
        return CastWeight(value, dtype)
    cast = name == "x" and isinstance(value, Tensor) and value.dtype in DTYPE_NAMES
    return value.to(dtype) if cast else value


def _transformed(function: Callable[..., Tensor], operands: Mapping[str, object]) -> Tensor:
    interpreter = _functorch.peek_interpreter_stack()
    assert interpreter is not None  # transforms are active
    if interpreter.key() not in (_functorch.TransformType.Grad, _functorch.TransformType.Functionalize):
        raise NotImplementedError(_no_transform(interpreter.key().name))
    tensors = {name: value for name, value in operands.items() if isinstance(value, Tensor)}
    others = {name: value for name, value in operands.items() if name not in tensors}

    def again(*values: Tensor) -> Tensor:
        return function(**dict(zip(tensors, values, strict=True)), **others)

    return _transformed_call(again, *tensors.values())


def _no_transform(name: str) -> str:
    return (
        f"torch.func's {name.lower()} was applied to a grouped layer, which has no rule for it; groups are the layer's "
        "own batch: give all rows in one call, a group of group_sizes for each"
    )


class _CallContext(AutogradContext, Protocol):
    again: Callable[..., Tensor]


class _Transformed(torch.autograd.Function):
    """A call inside torch.func.grad: forward sees ordinary tensors, and backward runs it again with autograd."""

    @staticmethod
    def forward(again: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
        """The call's result."""
        return again(*tensors)

    @staticmethod
    def setup_context(
        ctx: _CallContext, inputs: tuple[Callable[..., Tensor], *tuple[Tensor, ...]], output: Tensor
    ) -> None:
        """Keeps the call and its tensors."""
        ctx.again = inputs[0]
        ctx.save_for_backward(*inputs[1:])

    @staticmethod
    def backward(ctx: _CallContext, dy: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of the tensors."""
        needs = tuple(ctx.needs_input_grad[1:])
        grads = iter(_gradients(ctx.again, needs, dy, *ctx.saved_tensors))
        return (None, *(next(grads) if needed else None for needed in needs))

    @staticmethod
    def vmap(*_: object) -> NoReturn:
        """Raises NotImplementedError."""
        raise NotImplementedError(_no_transform("vmap"))


class _Gradients(torch.autograd.Function):
    """The gradients of a call, which have no derivative."""

    @staticmethod
    def forward(
        again: Callable[..., Tensor], needs: tuple[bool, ...], dy: Tensor, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        """One for each tensor that needs one."""
        with torch.enable_grad():
            leaves = [value.detach().requires_grad_(needed) for value, needed in zip(tensors, needs, strict=True)]
            inputs = [leaf for leaf, needed in zip(leaves, needs, strict=True) if needed]
            return torch.autograd.grad(again(*leaves), inputs, dy)

    @staticmethod
    def setup_context(*_: object) -> None:
        """Keeps nothing."""

    @staticmethod
    def backward(*_: object) -> NoReturn:
        """Raises NotImplementedError."""
        raise refuse()

    @staticmethod
    def vmap(*_: object) -> NoReturn:
        """Raises NotImplementedError."""
        raise NotImplementedError(_no_transform("vmap"))


_transformed_call: Callable[..., Tensor] = _Transformed.apply
_gradients: Callable[..., tuple[Tensor, ...]] = _Gradients.apply

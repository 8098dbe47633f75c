"""Calls inside torch.func.grad: each is an autograd function that sees ordinary tensors, and has one derivative."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import NoReturn, Protocol

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from octavo_torch.arrays.versioned import Versioned
from octavo_torch.compiler.autocast import autocast_now
from octavo_torch.compiler.autograd_context import AutogradContext
from octavo_torch.compiler.refused_derivatives import no_second_derivative
from octavo_torch.compiler.transforms import Subject, check_transform, no_transform


class _RepeatableCall:
    """A call as a function of the tensors among its operands, however deep they are in tuples and codes.

    torch.func.grad runs backward when its function has returned, outside of the autocast that the function was in, so
    each run is in the autocast in which the call was made.
    """

    def __init__(self, function: Callable[..., Tensor], operands: Mapping[str, object], subject: Subject) -> None:
        known = {
            name: value.without_version() if isinstance(value, Versioned) else value for name, value in operands.items()
        }
        leaves, self._spec = pytree.tree_flatten(known)
        self._places = [number for number, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        self.tensors: list[Tensor] = [leaves[number] for number in self._places]
        self._leaves = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self._function, self.subject = function, subject
        self._autocasts = [autocast_now(device) for device in {value.device.type for value in self.tensors}]

    def __call__(self, *tensors: Tensor) -> Tensor:
        """The call's result, with these tensors."""
        leaves = [*self._leaves]
        for number, value in zip(self._places, tensors, strict=True):
            leaves[number] = value
        with ExitStack() as stack:
            for autocast in self._autocasts:
                stack.enter_context(autocast())
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

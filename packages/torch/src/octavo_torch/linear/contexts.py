"""Calls inside torch.autocast and torch.func's transforms, which a layer's own autograd knows nothing of."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C import _functorch

from octavo_torch.arrays.dtypes import DTYPE_NAMES
from octavo_torch.compiler.second_derivative import refuse

_CAST = frozenset({"x", "weight", "w1", "w2"})
_OPERANDS = _CAST | {"bias", "bias_scales", "probs", "bias1", "bias2", "bias2_scales"}

autocast_anywhere: Callable[[], bool] = torch._C._is_any_autocast_enabled
transforms_active: Callable[[], bool] = torch._C._are_functorch_transforms_active


def matters(x: Any) -> bool:
    """True where a call with these rows is one for `run`: in a transform, or with autocast on for x's device."""
    if transforms_active():
        return True
    return isinstance(x, Tensor) and torch.is_autocast_enabled(x.device.type)


def run(function: Callable[..., Tensor], given: Mapping[str, Any]) -> Tensor:
    """`function(**given)`: with x and weights in autocast's dtype and autocast off, or as transforms take it.

    x and weights in high precision are cast; codes are not.
    """
    if transforms_active():
        return _transformed(function, given)
    device = given["x"].device.type
    dtype = torch.get_autocast_dtype(device)
    with torch.autocast(device, enabled=False):
        return function(**{name: _cast(dtype, value) if name in _CAST else value for name, value in given.items()})


def run_backward(backward: Callable[[Any, Tensor], list[Tensor | None]], ctx: Any, dy: Tensor) -> list[Tensor | None]:
    """`backward(ctx, dy)` with autocast off: it has chosen its dtypes already."""
    if not autocast_anywhere():
        return backward(ctx, dy)
    with torch.autocast(dy.device.type, enabled=False):
        return backward(ctx, dy)


def _cast(dtype: torch.dtype, value: Any) -> Any:
    if isinstance(value, tuple | list):
        return tuple(_cast(dtype, part) for part in value)
    return value.to(dtype) if isinstance(value, Tensor) and value.dtype in DTYPE_NAMES else value


def _transformed(function: Callable[..., Tensor], given: Mapping[str, Any]) -> Tensor:
    interpreter = _functorch.peek_interpreter_stack()
    assert interpreter is not None  # transforms are active
    if interpreter.key() not in (_functorch.TransformType.Grad, _functorch.TransformType.Functionalize):
        raise NotImplementedError(_no_transform(interpreter.key().name))
    names = [name for name, value in given.items() if name in _OPERANDS and isinstance(value, Tensor)]
    rest = {name: value for name, value in given.items() if name not in names}

    def again(*tensors: Tensor) -> Tensor:
        return function(**dict(zip(names, tensors, strict=True)), **rest)

    result: Tensor = _Transformed.apply(again, *(given[name] for name in names))  # type: ignore[no-untyped-call]
    return result


def _no_transform(name: str) -> str:
    return (
        f"torch.func's {name.lower()} was applied to a grouped layer, which has no rule for it; groups are the layer's "
        "own batch: give all rows in one call, a group of group_sizes for each"
    )


class _Transformed(torch.autograd.Function):
    """A call inside torch.func.grad: forward sees ordinary tensors, and backward runs it again with autograd."""

    @staticmethod
    def forward(again: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
        """The call's result."""
        return again(*tensors)

    @staticmethod
    def setup_context(ctx: Any, inputs: Sequence[Any], output: Any) -> None:
        """Keeps the call and its tensors."""
        ctx.again = inputs[0]
        ctx.save_for_backward(*inputs[1:])

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of the tensors."""
        wanted = tuple(ctx.needs_input_grad[1:])
        made = iter(_Gradients.apply(ctx.again, wanted, dy, *ctx.saved_tensors))  # type: ignore[no-untyped-call]
        return (None, *(next(made) if needed else None for needed in wanted))

    @staticmethod
    def vmap(info: Any, in_dims: Any, *args: Any) -> Any:
        """Raises NotImplementedError."""
        raise NotImplementedError(_no_transform("vmap"))


class _Gradients(torch.autograd.Function):
    """The gradients of a call, which have no derivative."""

    @staticmethod
    def forward(again: Callable[..., Tensor], wanted: tuple[bool, ...], dy: Tensor, *tensors: Tensor) -> Any:
        """One for each wanted tensor."""
        with torch.enable_grad():
            leaves = [value.detach().requires_grad_(needed) for value, needed in zip(tensors, wanted, strict=True)]
            asked = [leaf for leaf, needed in zip(leaves, wanted, strict=True) if needed]
            return torch.autograd.grad(again(*leaves), asked, dy)

    @staticmethod
    def setup_context(ctx: Any, inputs: Sequence[Any], output: Any) -> None:
        """Keeps nothing."""

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Any:
        """Raises NotImplementedError."""
        raise refuse()

    @staticmethod
    def vmap(info: Any, in_dims: Any, *args: Any) -> Any:
        """Raises NotImplementedError."""
        raise NotImplementedError(_no_transform("vmap"))

"""One tensor per group: G tensors of one shape, read as one tensor [G, ...], each with its own gradient."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

import torch
from torch import Tensor

from octavo_torch.arrays.dtypes import name_of
from octavo_torch.arrays.zero_gradient import parts_of
from octavo_torch.compiler.autocast import without_autocast
from octavo_torch.compiler.tracing import is_plain

Weights = Tensor | Sequence[Tensor]
"""A parameter of a grouped layer: one tensor with the groups as its first axis, or one tensor per group."""


def stacked_view(parts: Sequence[Tensor]) -> Tensor | None:
    """A view [G, ...] of `parts` where they lie in order, evenly spaced, in one block of memory; else None."""
    first = parts[0]
    strides, size = first.stride(), first.element_size()
    start = first.data_ptr()
    step = parts[1].data_ptr() - start if len(parts) > 1 else first.numel() * size
    extent = 1 + sum((length - 1) * stride for length, stride in zip(first.shape, strides, strict=True))
    if not first.numel() or step % size or step < extent * size:
        return None
    if any(part.data_ptr() != start + g * step or part.stride() != strides for g, part in enumerate(parts)):
        return None
    memory = first.untyped_storage()
    # neighbours in memory by chance are not one allocation
    if (len(parts) - 1) * step + extent * size > memory.data_ptr() + memory.nbytes() - start:
        return None
    return first.detach().as_strided((len(parts), *first.shape), (step // size, *strides))


def stacked(parts: Sequence[Tensor]) -> Tensor:
    """torch.stack; inside of autocast, which would stack fp32 and its own dtype alone, in any dtype."""
    with without_autocast(parts[0].device.type):
        return torch.stack(tuple(parts))


def concatenated(parts: Sequence[Tensor], dim: int = 0) -> Tensor:
    """torch.cat; inside of autocast in any dtype, as `stacked`."""
    with without_autocast(parts[0].device.type):
        return torch.cat(tuple(parts), dim)


class _Joined(torch.autograd.Function):
    """G tensors as one [G, ...]; their gradients are the parts of one tensor."""

    @staticmethod
    def forward(_: object, *parts: Tensor) -> Tensor:
        """A view where they share memory, else a copy."""
        return _whole(parts)

    @staticmethod
    def backward(_: object, grad: Tensor) -> tuple[Tensor, ...]:
        """One gradient per part."""
        return parts_of(grad)


_joined: Callable[..., Tensor] = _Joined.apply


def _whole(parts: Sequence[Tensor]) -> Tensor:
    # tensors of a compiler's trace have no address
    whole = stacked_view(parts) if all(map(is_plain, parts)) else None
    return stacked(parts) if whole is None else whole


def joined(name: str, parts: Sequence[object]) -> Tensor:
    """`parts` as one tensor [G, ...], differentiable in each: without a copy where they share memory, except in a graph
    of torch.compile. One part is never copied.

    Raises ValueError unless they are tensors of one shape, dtype and device, at least one.
    """
    if not parts:
        raise ValueError(f"{name} is empty; give one tensor per group, at least one")
    first = parts[0]
    for index, part in enumerate(parts):
        if not isinstance(part, Tensor) or not isinstance(first, Tensor):
            raise ValueError(f"{name}[{index}] is a {type(part).__name__}; give one tensor per group")
        if part.shape != first.shape or part.dtype is not first.dtype or part.device != first.device:
            raise ValueError(
                f"{name}[{index}] is {name_of(part.dtype)} {list(part.shape)} on {part.device} and {name}[0] "
                f"{name_of(first.dtype)} {list(first.shape)} on {first.device}; give tensors that are alike"
            )
    tensors = cast("Sequence[Tensor]", parts)
    if len(tensors) == 1:
        return tensors[0].unsqueeze(0)
    if torch.is_grad_enabled() and any(part.requires_grad for part in tensors):
        return _joined(*tensors)
    return _whole(tensors)


def as_one(name: str, value: object) -> Tensor:
    """`value`, or its `joined` tensor where it is a sequence with one tensor per group."""
    return joined(name, value) if type(value) is tuple or type(value) is list else cast(Tensor, value)


def leaves_of(value: Weights) -> tuple[Tensor, ...]:
    """The tensors that `value` consists of."""
    return (value,) if isinstance(value, Tensor) else tuple(value)


def are_same(value: Weights | None, other: Weights) -> bool:
    """Whether both consist of the very same tensors, in the same order; False for None."""
    ours, theirs = () if value is None else leaves_of(value), leaves_of(other)
    return len(ours) == len(theirs) and all(a is b for a, b in zip(ours, theirs, strict=True))


def version_of(value: Weights) -> int | None:
    """A number that grows with every change in place; 0 for tensors of a compiler's trace.

    None for a tensor that was made in torch.inference_mode, of which torch counts no changes.
    """
    parts = list(filter(is_plain, leaves_of(value)))
    if any(part.is_inference() for part in parts):
        return None
    return sum(part._version for part in parts)


@torch.no_grad()
def share(parts: Sequence[Tensor]) -> None:
    """Move `parts` into one block of memory, in order, unless they are in one; each stays the same tensor object."""
    alike = len({(part.shape, part.dtype, part.device) for part in parts}) == 1
    if len(parts) > 1 and alike and stacked_view(parts) is None:
        for part, memory in zip(parts, stacked([part.detach() for part in parts]), strict=True):
            part.data = memory

"""Tensors that a forward saves for its backward, checked when the backward reads them.

A saved-tensor hook may give back what it likes. A parameter is saved as itself: where its `.data` is replaced, as by
`module.float()`, backward reads the new one. torch's own operations check what they are given; kernels take addresses,
and would read other memory, or the right memory in the wrong order.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import Parameter

from octavo_torch.arrays.dtypes import name_of
from octavo_torch.compiler.autograd_context import AutogradContext, Packed
from octavo_torch.compiler.tracing import is_plain
from octavo_torch.compiler.transforms import is_wrapped

_ALIGNMENT = 16
"""Bytes that kernels load at once, and at a multiple of which torch's own memory begins."""

_hooks = torch._C._autograd._top_saved_tensors_default_hooks
_is_compiling = torch.compiler.is_compiling


def save(ctx: AutogradContext, *tensors: Tensor | None) -> None:
    """ctx.save_for_backward, for `saved_tensors` to read."""
    ctx.save_for_backward(*tensors)
    ctx.hooked, ctx.packed = _hooks(True) is not None, None
    if ctx.hooked:
        ctx.packed = tuple(map(_packed, tensors))
    elif Parameter in map(type, tensors) and not _is_compiling():  # what a compiler traces does not change under it
        ctx.packed = tuple([_packed(each) if type(each) is Parameter else None for each in tensors])


def saved_tensors(ctx: AutogradContext) -> tuple[Tensor, ...]:
    """ctx.saved_tensors; those that came through hooks contiguous.

    Raises ValueError for one that has another dtype, shape or device than it had.
    """
    tensors, packed = ctx.saved_tensors, ctx.packed
    if packed is None:
        return tensors
    if ctx.hooked:
        return tuple(map(_checked, tensors, packed))  # type: ignore[arg-type]  # torch's type says nothing of None
    # in line: a layer may take tens of microseconds, of which each call of a Python function is a noticeable part
    for tensor, saved in zip(tensors, packed, strict=True):
        if saved is not None and saved != (tensor.dtype, tensor.shape, tensor.device):
            raise _changed(tensor, saved)
    return tensors


def _packed(tensor: Tensor | None) -> Packed | None:
    return None if tensor is None else (tensor.dtype, tensor.shape, tensor.device)


def _told(packed: Packed) -> str:
    dtype, shape, device = packed
    return f"{name_of(dtype)} {list(shape)} on {device}"


def _changed(tensor: Tensor, saved: Packed) -> ValueError:
    now = tensor.dtype, tensor.shape, tensor.device
    return ValueError(
        f"backward reads a tensor that was {_told(saved)} in forward and is {_told(now)} now; cast or move modules, "
        "and replace the .data of parameters, after backward"
    )


def _checked(tensor: Tensor | None, packed: Packed | None) -> Tensor | None:
    if tensor is None or packed is None or not is_plain(tensor) or is_wrapped(tensor):
        return tensor
    given = tensor.dtype, tensor.shape, tensor.device
    if given != packed:
        raise ValueError(
            f"a saved-tensor hook gave back {_told(given)} in the place of {_told(packed)}; let it give back a tensor "
            "like the one that it was given"
        )
    if tensor.is_contiguous() and not tensor.data_ptr() % _ALIGNMENT:
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)
